"""Daemons that keep host copies, and the processes that hold these beside them."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import swapd_client
from benchmarks.processes import keepers
from swapd.daemon.host_copies import NAME
from swapd.shared import runtime_dir
from tests.guarantees.harness import MIB, Daemon, World

NBYTES = 4 * MIB
NAMES = ("talker", "vae", "thinker")


def values(name: str) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(NAMES.index(name))
    return torch.randn(NBYTES // 4, generator=numbers)


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


def await_no_keeper(daemon: Daemon) -> None:
    while keepers(daemon.folder):
        """It looks once in a few seconds whether it can be found."""


def await_held(daemon: Daemon, count: int) -> None:
    """Wait until keepers hold so many host copies."""

    def held() -> int:
        with suppress(OSError):
            folders = [Path(f"/proc/{pid}/fd") for pid in keepers(daemon.folder)]
            files = [fd for folder in folders for fd in folder.iterdir()]
            return sum(f"memfd:{NAME} " in str(fd.readlink()) for fd in files)
        return -1

    while held() != count:
        pass


Pair = tuple[int, int]


@contextmanager
def in_place_of_a_daemon(daemon: Daemon) -> Iterator[tuple[socket.socket, dict[bytes, Pair]]]:
    """The connection to the keeper, and what it holds: host copies and manifests, by name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(daemon.folder / runtime_dir.KEEPER))
        held: dict[bytes, Pair] = {}
        while True:
            message, fds, _, _ = socket.recv_fds(sock, 4096, 2)
            if message == b"READY=1":
                break
            copy, manifest = fds
            held[message.partition(b"\n")[2]] = copy, manifest
        yield sock, held
        for fd in (fd for pair in held.values() for fd in pair):
            os.close(fd)
