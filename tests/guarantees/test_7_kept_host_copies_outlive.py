"""Host copies that `--keep-host` keeps outlive a daemon that is killed: the next one has them."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import swapd_client
from swapd.shared import runtime_dir
from swapd_client.weights import contents, safetensors
from tests.guarantees.harness import MIB, Daemon, World

NBYTES = 4 * MIB
NAMES = ("talker", "vae", "thinker")


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as old at once."""
    monkeypatch.setattr(safetensors, "SETTLED_NS", -(10**9))


def values(name: str) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(NAMES.index(name))
    return torch.randn(NBYTES // 4, generator=numbers)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / f"{name}.safetensors" for name in NAMES}
    for name, path in paths.items():
        save_file({"x": values(name)}, path)
    return paths


def serve(world: World, **settings: Any) -> Daemon:
    return world.daemon(**{"keep_host": "64MiB", "host_memory": "256MiB", **settings})


def was_read(daemon: Daemon, name: str, path: Path) -> bool:
    """Whether a session reads the file to load it. The session checks every byte, and ends."""
    told: list[int] = []
    with swapd_client.connect(daemon.folder) as client:
        loaded = client.load(name, path, progress=lambda done, _: told.append(done))
        with client.acquire(name):
            assert torch.equal(loaded.tensors["x"], values(name))
    return bool(told)


def kept(daemon: Daemon) -> list[str]:
    return [one.name for one in daemon.status().kept]


def await_kept(daemon: Daemon, *names: str) -> None:
    while kept(daemon) != list(names):
        """The end of a session is seen, and a host copy mapped, a moment later."""


def keep(daemon: Daemon, files: dict[str, Path], *names: str) -> None:
    """Load these, so that they are kept, in this order."""
    for at, name in enumerate(names, 1):
        assert was_read(daemon, name, files[name])
        await_kept(daemon, *names[:at])


def keepers(daemon: Daemon) -> list[int]:
    """The processes that hold host copies for this folder."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            command = (process / "cmdline").read_bytes().split(b"\0")
            here = (process / "cwd").samefile(daemon.folder)
            if here and command[-2:-1] == [runtime_dir.KEEPER.encode()]:
                found.append(int(process.name))
    return found


def await_no_keeper(daemon: Daemon) -> None:
    while keepers(daemon):
        pass


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
        nbytes = daemon.status().host_copy_bytes
        monkeypatch.setattr(contents, "is_filled", lambda *_: pytest.fail("it compared"))
        assert not any(was_read(daemon, name, path) for name, path in files.items())
        await_kept(daemon, *NAMES)
        assert daemon.status().host_copy_bytes == nbytes
        assert len(keepers(daemon)) == 1
