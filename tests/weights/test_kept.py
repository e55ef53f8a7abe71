"""What a session loaded from files outlives it: the next load of these files reads nothing."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import swapd_client
from swapd import spawn
from swapd.core.actions import KeepHostCopy
from swapd.daemon.host_copies import SPARE_DESCRIPTORS
from swapd.log.reader import read
from swapd.log.replay import replay
from swapd.shared import fds, vm
from swapd.web.metrics import render
from swapd_client import Client, OutOfMemory
from swapd_client.weights import contents, safetensors
from tests import served
from tests.weights.test_poisoned_sharing import PARTS, bits, values
from tests.weights.test_sharing import Loader, await_components, host_bytes
from tests.weights.test_update import same

MIB = 1 << 20


@pytest.fixture
def daemon() -> Iterator[spawn.Spawned]:
    with spawn.daemon(budget="64MiB", keep_host="64MiB", host_memory="64MiB") as daemon:
        yield daemon


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old at once."""
    monkeypatch.setattr(safetensors, "SETTLED_NS", -(10**9))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    save_file(values(), path)
    return path


def await_settled(path: Path) -> None:
    while True:
        with closing(safetensors.File(path)) as opened:
            if opened.is_settled:
                return


def load_once(
    daemon: spawn.Spawned, file: Path, **how: Any
) -> tuple[dict[str, torch.Tensor], bool]:
    """A session loads `file`, uses it and ends; its values, and whether it read the file."""
    told: list[int] = []
    with swapd_client.connect(daemon.folder) as client:
        part = client.load("x", file, progress=lambda done, _: told.append(done), **how)
        return bits(client, "x", part), bool(told)


def kept(client: Client) -> list[tuple[str, int]]:
    return [(one.name, one.nbytes) for one in client.status().kept]


def counted(client: Client) -> float:
    """The gauge of `/metrics`."""
    lines = render(client.status(), age_s=0.0, accept="")[0].decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("swapd_kept_bytes ")))


def await_kept(client: Client, *names: str) -> None:
    """Wait until these are kept: the end of a session is seen a moment later."""
    while [one.name for one in client.status().kept] != list(names):
        pass


def await_nothing(client: Client, daemon: spawn.Spawned) -> None:
    while client.status().host_copy_bytes or host_bytes(daemon):
        pass


@pytest.mark.usefixtures("settled")
def test_the_next_session_has_the_bits_and_neither_reads_nor_compares(
    daemon: spawn.Spawned, client: Client, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_once(daemon, file)[1]
    await_kept(client, "x")
    nbytes = client.status().host_copy_bytes
    assert kept(client) == [("x", nbytes)]
    assert counted(client) == nbytes
    monkeypatch.setattr(contents, "is_filled", lambda *_: pytest.fail("it compared"))
    for _ in range(2):
        found, was_read = load_once(daemon, file)
        assert not was_read
        assert same(found, values())
        await_kept(client, "x")
    assert client.status().host_copy_bytes == nbytes
    assert host_bytes(daemon) == vm.round_up(nbytes)


def rewrite(file: Path) -> None:
    """In place, with its size and mtime."""
    before, other = file.stat(), file.with_name("other")
    save_file(values(1), other)
    file.write_bytes(other.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(file: Path) -> None:
    """By another file of its size and mtime."""
    before, other = file.stat(), file.with_name("other")
    save_file(values(1), other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)


def touch(file: Path) -> None:
    os.utime(file)


def leave(file: Path) -> None:
    """It stays as it is."""


Change = Callable[[Path], None]


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    ("change", "how"),
    [
        (rewrite, {}),
        (replace, {}),
        (touch, {}),
        (leave, {"dtype": torch.float32}),
        (leave, {"prefix": "a"}),
        (leave, {"rename": lambda name: {"a": "b", "b": "a"}.get(name, name)}),
        (leave, {"segments": [["a"], ["b"], ["c"]]}),
        (leave, {"mutable": True}),
    ],
    ids=["rewritten", "replaced", "touched", "dtype", "slice", "names", "segments", "mutable"],
)
def test_no_stale_byte_is_bound_whatever_has_changed(
    daemon: spawn.Spawned, client: Client, file: Path, change: Change, how: dict[str, Any]
) -> None:
    load_once(daemon, file)
    await_kept(client, "x")
    change(file)
    found, was_read = load_once(daemon, file, **how)
    assert was_read or how.get("segments")
    fresh = values(1 if change in (rewrite, replace) else 0)
    if rename := how.get("rename"):
        fresh = {rename(name): value for name, value in fresh.items()}
    if prefix := how.get("prefix"):
        fresh = {n.removeprefix(prefix): v for n, v in fresh.items() if n.startswith(prefix)}
    dtype = how.get("dtype", torch.bfloat16)
    assert same(found, {name: value.to(dtype) for name, value in fresh.items()})


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("changed", ["READER", "__version__"])
def test_nor_what_another_reader_made(
    daemon: spawn.Spawned,
    client: Client,
    file: Path,
    changed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_once(daemon, file)
    await_kept(client, "x")
    from swapd_client.weights import load

    monkeypatch.setattr(load if changed == "READER" else torch, changed, "another")
    assert load_once(daemon, file)[1]


@pytest.mark.usefixtures("settled")
def test_two_files_in_another_order_are_bound_by_what_each_tensor_reads(
    daemon: spawn.Spawned, client: Client, tmp_path: Path
) -> None:
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    save_file({"a": torch.zeros(1000)}, first)
    save_file({"b": torch.ones(1000)}, second)
    with swapd_client.connect(daemon.folder) as one:
        one.load("x", [first, second])
    await_kept(client, "x")
    first.rename(tmp_path / "3.safetensors")
    second.rename(first)
    (tmp_path / "3.safetensors").rename(second)
    part = client.load("y", [first, second])
    expected = {"a": torch.zeros(1000), "b": torch.ones(1000)}
    assert same(bits(client, "y", part), expected)


def test_a_file_that_was_just_written_is_not_kept(
    daemon: spawn.Spawned, client: Client, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write within a tick of the file system's clock would not show."""
    monkeypatch.setattr(safetensors, "SETTLED_NS", 1 << 62)
    load_once(daemon, file)
    await_nothing(client, daemon)
    assert kept(client) == []


@pytest.mark.usefixtures("settled")
def test_what_a_module_registers_or_a_client_may_write_is_not_kept(
    daemon: spawn.Spawned, client: Client, file: Path
) -> None:
    with swapd_client.connect(daemon.folder) as one:
        one.register("guessed", {"a": torch.ones(1000)})
        one.load("written", file, mutable=True)
    await_nothing(client, daemon)
    assert kept(client) == []


def test_workers_that_are_killed_leave_all_of_it_or_nothing(
    daemon: spawn.Spawned, client: Client, file: Path
) -> None:
    save_file({"a": torch.randn(100_000)}, file)  # the program reads values of numpy's kinds
    await_settled(file)
    for _ in range(2):
        with Loader(daemon, "one", file, stop_at="filling") as one:
            one.expect("filling")
            one.die()
        await_components(client)
        await_nothing(client, daemon)
        assert kept(client) == []
    with Loader(daemon, "one", file) as one:
        one.expect("loaded")
        digest, was_read = one.bits()
        assert was_read
        one.die()
    await_kept(client, "one")
    with Loader(daemon, "two", file) as two, Loader(daemon, "three", file) as three:
        for each in (two, three):
            each.expect("loaded")
            assert each.bits() == (digest, False), "both ask at once"
        assert kept(client) == []
        assert host_bytes(daemon) == vm.round_up(client.status().host_copy_bytes)
        client.forget()
        assert two.bits() == (digest, False)
    await_components(client)
    assert len(kept(client)) == 1
    assert host_bytes(daemon) == vm.round_up(client.status().host_copy_bytes)


@pytest.mark.usefixtures("settled")
def test_what_is_forgotten_leaves_no_byte_and_no_descriptor(
    daemon: spawn.Spawned, client: Client, file: Path
) -> None:
    client.status()
    descriptors = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    with swapd_client.connect(daemon.folder) as one:
        one.load_family("f", file, PARTS)
    await_kept(client, "f/0", "f/1", "f/rest")
    with pytest.raises(swapd_client.UnknownComponent, match="kept: f"):
        client.forget("f", "g")
    client.forget(client.status().kept[0].content)
    await_kept(client, "f/1", "f/rest")
    client.forget("f")
    await_nothing(client, daemon)
    while len(os.listdir(f"/proc/{daemon.pid}/fd")) > descriptors:
        pass


@pytest.mark.usefixtures("settled")
def test_it_makes_way_for_a_registration_that_lacks_host_memory(
    daemon: spawn.Spawned, client: Client, file: Path
) -> None:
    load_once(daemon, file)
    await_kept(client, "x")
    client.register("large", {"a": torch.ones(64 * MIB, dtype=torch.uint8)})
    assert kept(client) == []
    with pytest.raises(OutOfMemory):
        client.register("one more", {"a": torch.ones(MIB, dtype=torch.uint8)})


@pytest.mark.usefixtures("settled")
def test_it_makes_way_where_descriptors_are_scarce(
    daemon: spawn.Spawned, client: Client, tmp_path: Path
) -> None:
    names = [f"t{i}" for i in range(30)]
    save_file({name: torch.ones(1000) for name in names}, tmp_path / "x.safetensors")
    with swapd_client.connect(daemon.folder) as one:
        one.load_family("f", tmp_path / "x.safetensors", {name: [name] for name in names})
    await_kept(client, *(f"f/{name}" for name in names))
    used = max(int(fd) for fd in os.listdir(f"/proc/{daemon.pid}/fd"))
    _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    limit = used - 8 + fds.RESERVE + SPARE_DESCRIPTORS  # a new host copy takes the place of one
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, hard))
    for i in range(8):
        client.register(f"new {i}", {"a": torch.full((1000,), float(i))})
    assert len(kept(client)) < 30


@pytest.mark.usefixtures("settled")
def test_a_recorded_run_decides_the_same_when_it_is_replayed(tmp_path: Path, file: Path) -> None:
    log = tmp_path / "log"
    with served.alone(budget="64MiB", keep_host="64MiB", swap_log=log) as (daemon, client):
        for _ in range(2):
            load_once(daemon, file)
            await_kept(client, "x")
        client.forget("x")
    steps = list(replay(line.raw for line in read(log)))
    assert all(step.actions == step.recorded for step in steps)
    assert sum(isinstance(a, KeepHostCopy) for step in steps for a in step.actions) == 2
