"""Host copies that `--keep-host` keeps outlive a daemon that is killed: the next one has them."""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

import swapd_client
from benchmarks.processes import keepers
from swapd.core.ledger import HostCopyIndex
from swapd.core.records import Component
from swapd.core.registry import KEPT_MAX
from swapd.daemon import parked_copies, parking
from swapd.daemon.host_copies import NAME
from swapd.daemon.parked_copies import MANIFEST, Manifest
from swapd.shared import runtime_dir
from swapd.shared.fds import OwnedFd, send_packet
from swapd.shared.runtime_dir import Folder, open_folder
from swapd_client import SwapdError
from swapd_client.weights import contents, safetensors
from tests.guarantees import dying
from tests.guarantees.harness import World
from tests.guarantees.keeping import (
    NAMES,
    NBYTES,
    Pair,
    await_held,
    await_kept,
    await_no_keeper,
    in_place_of_a_daemon,
    keep,
    kept,
    serve,
    values,
    was_read,
)
from tests.posted import Posted
from tests.test_host_copies import Copies, Unpinnable, refuse_with


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old at once."""
    monkeypatch.setattr(safetensors, "SETTLED_NS", -(10**9))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / f"{name}.safetensors" for name in NAMES}
    for name, path in paths.items():
        save_file({"x": values(name)}, path)
    return paths


@pytest.mark.parametrize("signals", ["the daemon", "its process group"])
def test_the_next_daemon_has_them_and_no_file_is_read(
    world: World, files: dict[str, Path], signals: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = serve(world, before=os.setsid) if signals != "the daemon" else serve(world)
    keep(daemon, files, *NAMES)
    for _ in range(2):
        if signals != "the daemon":
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.kill()
        daemon = serve(world, before=os.setsid)
        await_kept(daemon, *NAMES)
        assert "ends with this daemon" not in daemon.log
        nbytes = daemon.status().host_copy_bytes
        monkeypatch.setattr(contents, "is_filled", lambda *_: pytest.fail("it compared"))
        assert not any(was_read(daemon, name, path) for name, path in files.items())
        await_kept(daemon, *NAMES)
        assert daemon.status().host_copy_bytes == nbytes
        assert len(keepers(daemon.folder)) == 1


def test_a_daemon_that_stops_in_order_takes_them_with_it(
    world: World, files: dict[str, Path]
) -> None:
    daemon = serve(world)
    keep(daemon, files, "talker", "vae")
    await_held(daemon, 2)
    daemon.close()
    await_no_keeper(daemon)
    daemon = serve(world)
    assert kept(daemon) == []
    assert was_read(daemon, "vae", files["vae"])


def test_nothing_kept_is_no_process(world: World, files: dict[str, Path]) -> None:
    daemon = serve(world)
    assert not keepers(daemon.folder)
    keep(daemon, files, "talker")
    await_held(daemon, 1)
    daemon.observer.forget()
    await_no_keeper(daemon)
    daemon.kill()
    daemon = serve(world, keep_host=0)
    assert was_read(daemon, "talker", files["talker"])
    assert not keepers(daemon.folder)


def test_a_daemon_that_cannot_remove_the_keeper_s_socket_serves_on(
    world: World, files: dict[str, Path]
) -> None:
    daemon = serve(world)
    keep(daemon, files, "talker")
    await_held(daemon, 1)
    (daemon.folder / runtime_dir.KEEPER).unlink()
    (daemon.folder / runtime_dir.KEEPER).mkdir()
    daemon.observer.forget()
    keep(daemon, files, "vae")
    (daemon.folder / runtime_dir.KEEPER).rmdir()
    await_held(daemon, 1)


def test_one_in_use_is_not_parked_and_is_again_when_its_session_ends(
    world: World, files: dict[str, Path]
) -> None:
    daemon = serve(world)
    keep(daemon, files, "talker", "vae")
    with swapd_client.connect(daemon.folder) as client:
        client.load("again", files["talker"])
        await_held(daemon, 1)
    await_held(daemon, 2)


def test_of_hundreds_that_are_kept_at_once_all_are_parked(world: World, tmp_path: Path) -> None:
    """More than the keeper's socket holds while the keeper is being started."""
    names = [f"layer{i}" for i in range(2 * KEPT_MAX)]
    save_file({name: torch.zeros(8) + i for i, name in enumerate(names)}, tmp_path / "x")
    daemon = serve(world)
    with swapd_client.connect(daemon.folder) as client:
        client.load_family("f", tmp_path / "x", {name: [name] for name in names})
    await_held(daemon, KEPT_MAX)
    assert "the keeper" not in daemon.log
    daemon.kill()
    daemon = serve(world)
    while len(kept(daemon)) != KEPT_MAX:
        """They are mapped a moment later."""


def test_the_keeper_dies_and_another_has_them(world: World, files: dict[str, Path]) -> None:
    daemon = serve(world)
    keep(daemon, files, *NAMES)
    for _ in range(2):
        (pid,) = keepers(daemon.folder)
        os.kill(pid, signal.SIGKILL)
        await_held(daemon, 0)
        await_held(daemon, 3)
    assert "the keeper of kept host copies: it has ended; another starts in 1 s" in daemon.log
    daemon.kill()
    daemon = serve(world)
    await_kept(daemon, *NAMES)
    assert not any(was_read(daemon, name, path) for name, path in files.items())


def test_the_keeper_and_the_daemon_die(world: World, files: dict[str, Path]) -> None:
    daemon = serve(world)
    keep(daemon, files, "talker")
    (pid,) = keepers(daemon.folder)
    os.kill(daemon.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    daemon.kill()
    daemon = serve(world)
    assert was_read(daemon, "talker", files["talker"])


@pytest.mark.parametrize("by", ["a stop", "another"])
def test_a_keeper_that_does_not_answer_delays_no_daemon_for_long(
    world: World, files: dict[str, Path], by: str
) -> None:
    daemon = serve(world)
    keep(daemon, files, "talker")
    (pid,) = keepers(daemon.folder)
    daemon.kill()
    if by == "a stop":
        os.kill(pid, signal.SIGSTOP)
        after = serve(world)
        os.kill(pid, signal.SIGCONT)
    else:
        with in_place_of_a_daemon(daemon):
            after = serve(world)
    assert "the keeper of kept host copies: timed out; what it holds is dropped" in after.log
    assert was_read(after, "talker", files["talker"])
    await_held(after, 1)
    assert keepers(after.folder) != [pid]


@pytest.mark.parametrize(
    ("settings", "left", "why"),
    [
        ({"keep_host": "8MiB"}, ("vae", "thinker"), "more than --keep-host has room for"),
        ({"keep_host": 0}, (), "more than --keep-host has room for"),
        ({"budget": "2MiB"}, (), "larger than the budget"),
        ({"host_memory": "5MiB"}, ("thinker",), "raise the daemon's --host-memory"),
    ],
    ids=["less", "nothing", "budget", "host memory"],
)
def test_with_other_settings_what_fits_is_taken_back_and_the_rest_is_said(
    world: World,
    files: dict[str, Path],
    settings: dict[str, object],
    left: tuple[str, ...],
    why: str,
) -> None:
    """The last that were kept stay."""
    daemon = serve(world)
    keep(daemon, files, *NAMES)
    daemon.kill()
    daemon = serve(world, **settings)
    await_kept(daemon, *left)
    await_held(daemon, len(left))
    said = [line for line in daemon.log.splitlines() if "a kept host copy is dropped" in line]
    assert len(said) == len(NAMES) - len(left)
    assert all(why in line for line in said)
    assert daemon.status().host_copy_bytes == len(left) * NBYTES


def manifests(held: dict[bytes, Pair]) -> Iterator[tuple[bytes, Manifest]]:
    for name, (_, fd) in held.items():
        with OwnedFd(os.dup(fd)) as manifest:
            yield name, parked_copies._read(manifest)


_SIZES = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def memfd(name: str, data: bytes, seals: int) -> OwnedFd:
    fd = OwnedFd(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.write(fd.fileno(), data)
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, seals)
    return fd


def forged(kind: str, real: Manifest) -> tuple[OwnedFd, OwnedFd]:
    """A host copy with other bytes than `real`, and its manifest; something is wrong with them."""
    nbytes = NBYTES - (kind == "cut short")
    seals = _SIZES | (0 if kind == "writable" else fcntl.F_SEAL_WRITE)
    copy = memfd("a-file" if kind == "no host copy" else NAME, bytes(nbytes), seals)
    inode = real.inode if kind == "of another" else parked_copies.inode(copy)
    if kind == "rewritten":
        os.utime(copy.fileno(), ns=(0, 0))
    of = msgspec.structs.replace(real, inode=inode)
    match kind:
        case "no manifest":
            return copy, memfd("a-file", b"", 0)
        case "garbage":
            return copy, memfd(MANIFEST, b"\xc1" * 100, parked_copies._SEALS)
        case "half a manifest":
            with of.write() as whole:
                data = os.pread(whole.fileno(), 1 << 16, 0)
            return copy, memfd(MANIFEST, data[: len(data) // 2], parked_copies._SEALS)
        case "manifest not sealed":
            with of.write() as whole:
                return copy, memfd(MANIFEST, os.pread(whole.fileno(), 1 << 16, 0), 0)
    return copy, of.write()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("cut short", "talker (4 MiB) is cut short, or not sealed"),
        ("writable", "talker (4 MiB) is cut short, or not sealed"),
        ("of another", "it has no manifest"),
        ("rewritten", "it has no manifest"),
        ("no manifest", "it has no manifest"),
        ("garbage", "it has no manifest"),
        ("half a manifest", "it has no manifest"),
        ("manifest not sealed", "it has no manifest"),
        ("no host copy", ""),
    ],
)
def test_what_does_not_fit_its_manifest_is_said_and_serves_nobody(
    world: World, files: dict[str, Path], kind: str, why: str
) -> None:
    daemon = serve(world)
    keep(daemon, files, "talker", "vae")
    daemon.kill()
    with in_place_of_a_daemon(daemon) as (sock, held):
        name, real = next(one for one in manifests(held) if one[1].name == "talker")
        sock.send(b"FDSTOREREMOVE=1\n" + name)
        copy, manifest = forged(kind, real)
        with copy, manifest:
            fds = [copy.fileno(), manifest.fileno()]
            name = f"FDNAME={NAME}-{parked_copies.inode(copy)[0]}".encode()
            socket.send_fds(sock, [b"FDSTORE=1\n" + name], fds)
    daemon = serve(world)
    await_kept(daemon, "vae")
    assert (f"a kept host copy is dropped: {why}" in daemon.log) == bool(why)
    assert was_read(daemon, "talker", files["talker"])
    assert not was_read(daemon, "vae", files["vae"])
    await_held(daemon, 2)


def test_a_daemon_that_comes_while_the_keeper_ends_hears_that_nothing_is_held(
    world: World, files: dict[str, Path]
) -> None:
    """One such daemon logged that the kept host copies are lost."""
    daemon = serve(world)
    keep(daemon, files, "talker")
    daemon.kill()
    path = str(daemon.folder / runtime_dir.KEEPER)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
        with in_place_of_a_daemon(daemon) as (sock, held):
            late.connect(path)
            for name in held:
                sock.send(b"FDSTOREREMOVE=1\n" + name)
        assert late.recv(100) == b"READY=1"
        with pytest.raises(ConnectionRefusedError):
            in_place_of_a_daemon(daemon).__enter__()
    await_no_keeper(daemon)


@pytest.mark.parametrize("first", range(4))
def test_a_daemon_killed_at_any_line_leaves_all_of_one_or_nothing(
    world: World, files: dict[str, Path], first: int
) -> None:
    """While it parks, or takes back what the one before has parked."""
    died = 0
    for number in range(10 + 7 * first, 250, 28):
        for _ in range(2):
            daemon = serve(world, before=partial(dying.at_line, number), watched=False)
            with suppress(SwapdError), swapd_client.connect(daemon.folder, reconnect=0) as client:
                for name, path in files.items():
                    client.load(name, path)
                    client.unregister(name)
            died += not daemon.running
            daemon.kill()
        daemon = serve(world)
        assert "kept host cop" not in daemon.log
        for name, path in files.items():
            was_read(daemon, name, path)
        daemon.observer.forget()
        daemon.close()
    assert died > 4
    await_no_keeper(daemon)


@pytest.mark.parametrize("why", ["none comes", "none can come"])
def test_a_keeper_without_a_daemon_ends(
    world: World, files: dict[str, Path], tmp_path: Path, why: str
) -> None:
    daemon = serve(world)
    keep(daemon, files, "talker")
    daemon.kill()
    if why == "none can come":
        (daemon.folder / runtime_dir.KEEPER).unlink()
        return await_no_keeper(daemon)
    program = (
        "import os; from swapd.daemon import keeper; keeper.WAIT_S = keeper._LOOK_S = 0.1;"
        f"keeper.main({runtime_dir.KEEPER!r}, os.stat({runtime_dir.KEEPER!r}).st_ino)"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(tmp_path / runtime_dir.KEEPER))
        door.listen()
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=door.fileno(), cwd=tmp_path
        )
    with process:
        assert process.wait(60) == 0


def test_a_keeper_and_a_daemon_of_another_user_have_nothing_to_do_with_each_other(
    world: World, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = serve(world)
    daemon.close()
    program = (
        "import os; from swapd.daemon import keeper; os.getuid = lambda: 4321;"
        f"keeper.main({runtime_dir.KEEPER!r}, os.stat({runtime_dir.KEEPER!r}).st_ino)"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(str(daemon.folder / runtime_dir.KEEPER))
        door.listen()
        theirs = subprocess.Popen(
            [sys.executable, "-c", program], stdin=door.fileno(), cwd=daemon.folder
        )
    with theirs:
        daemon = serve(world)
        assert "the keeper of kept host copies: it has ended" in daemon.log
        keep(daemon, files, "talker")
        assert theirs.wait(60) == 0
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other, pytest.raises(PermissionError, match="it belongs to user"):
        parking._check_peer(one)


# --- a part at a time --------------------------------------------------------------------


async def test_an_upgrade_leaves_each_with_its_manifest(tmp_path: Path) -> None:
    host, copies = HostCopyIndex(), Copies(None, Unpinnable())
    copies.made(1, 4096, mutable=False)
    copies.sealed(1)
    host.kept[1] = None
    host.owners[1] = Component(1, "talker", 0, 4096, 1, "lru", None, mutable=False)
    with Folder(tmp_path, open_folder(tmp_path)) as folder:
        parking.Parking(host, copies, folder, Posted().inbox).leave()
    (left,) = parked_copies.sort(parked_copies.inherited())
    assert left.manifest is not None
    assert left.manifest.name == "talker"
    left.fd.take()  # it is still the other's
    copies.close()


async def test_a_keeper_that_is_behind_is_waited_for_until_it_takes_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "ANSWER_S", 3600.0)
    full = [BlockingIOError()]

    def send(*args: Any) -> None:
        if full:
            raise full.pop()
        send_packet(*args)

    monkeypatch.setattr(parking, "send_packet", send)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, Folder(tmp_path, open_folder(tmp_path)) as folder:
        made = parking.Parking(HostCopyIndex(), Copies(None, Unpinnable()), folder, Posted().inbox)
        made._keeper = ours
        made._tell("FDSTOREREMOVE=1", "a")
        assert theirs.recv(100) == b"FDSTOREREMOVE=1\nFDNAME=a"


def test_a_manifest_that_cannot_be_written_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse_with(errno.ENOSPC))
        with pytest.raises(OSError, match="No space"):
            Manifest("a", "", "x", "", 1, (1, 1), 1.0).write()
