"""Kept host copies are still there after `swapd upgrade`, and in systemd's descriptor store."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import swapd_client
from swapd.daemon.host_copies import NAME
from swapd.shared import runtime_dir
from swapd_client.weights import safetensors
from tests.files import host_copies

from .conftest import Running, ended, environment, served, swapd

NAMES = ("talker", "vae")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setattr(safetensors, "SETTLED_NS", -(10**9))
    paths = {name: tmp_path / name for name in NAMES}
    for at, path in enumerate(paths.values()):
        save_file({"x": torch.full((1 << 18,), float(at))}, path)
    return paths


def launched(folder: Path, fds: tuple[int, ...] = (), **variables: str) -> Running:
    """A daemon with a command line of its own, and no process between it and its parent."""
    words = ("serve", "--runtime-dir", folder, "--budget", "16MiB", "--keep-host", "64MiB")
    process = subprocess.Popen(
        [sys.executable, "-m", "swapd", *map(str, words)],
        env=environment(**variables),
        pass_fds=fds,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return served(folder, process)


def was_read(daemon: Running, name: str, path: Path) -> bool:
    """Whether a session reads the file. It checks every byte, and its host copy is kept then."""
    told: list[int] = []
    with swapd_client.connect(daemon.folder) as client:
        part = client.load(name, path, progress=lambda done, _: told.append(done))
        with client.acquire(name):
            assert part.tensors["x"].eq(float(NAMES.index(name))).all()
        client.unregister(name)
    return bool(told)


def await_kept(daemon: Running) -> None:
    with swapd_client.connect(daemon.folder) as client:
        while [one.name for one in client.status().kept] != list(NAMES):
            """They are mapped first."""


def await_parked(daemon: Running, but: int) -> None:
    """Wait until a keeper other than process `but` has all host copies: that takes a moment."""
    while True:
        for pid in children(daemon.process.pid):
            if pid != but and len(host_copies(pid)) == len(NAMES):
                return


@pytest.mark.parametrize("keeper", ["lives", "is stopped"])
def test_an_upgrade_keeps_them(folder: Path, files: dict[str, Path], keeper: str) -> None:
    with ended(launched(folder)) as daemon:
        assert all(was_read(daemon, name, path) for name, path in files.items())
        pid = 0
        if keeper == "is stopped":
            (pid,) = children(daemon.process.pid)
            os.kill(pid, signal.SIGSTOP)
        for _ in range(2):
            swapd("upgrade", "-e", daemon.folder)
            await_kept(daemon)
            assert not any(was_read(daemon, name, path) for name, path in files.items())
        await_parked(daemon, but=pid)
        daemon.stop(signal.SIGKILL)
    with ended(launched(folder)) as daemon:
        await_kept(daemon)
        assert not any(was_read(daemon, name, path) for name, path in files.items())
    if keeper == "is stopped":
        os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Systemd:
    """Its descriptor store, as it understands messages of its service."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.held: dict[str, list[int]] = {}
        self.barriers = 0

    def read(self) -> None:
        """Take in all that was sent."""
        while select.select([self._sock], [], [], 0)[0]:
            data, fds, _, _ = socket.recv_fds(self._sock, 4096, 8)
            lines = data.decode().splitlines()
            name = next((one.partition("=")[2] for one in lines if one[:7] == "FDNAME="), "")
            if "FDSTOREREMOVE=1" in lines:
                self._close(self.held.pop(name, []))
            if "BARRIER=1" in lines:
                self.barriers += 1
                assert (len(lines), len(fds)) == (1, 1), "systemd warns, and ignores all of it"
            if "FDSTORE=1" in lines:
                self.held.setdefault(name, []).extend(fds)
            else:
                self._close(fds)

    def await_all(self) -> None:
        """Until it holds the file and the manifest of each."""
        while [len(fds) for fds in self.held.values()] != [2] * len(NAMES):
            select.select([self._sock], [], [])
            self.read()

    def close(self) -> None:
        for fds in self.held.values():
            self._close(fds)

    def _close(self, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)

    def serve(self, folder: Path) -> Running:
        """Start the service: its descriptors are in any order."""
        named = [(name, fd) for name, fds in self.held.items() for fd in fds][::-1]
        listen = {
            "LISTEN_FDS": str(len(named)),
            "LISTEN_FDNAMES": ":".join(name for name, _ in named),
        }
        path = str(self._sock.getsockname())
        fds = tuple(fd for _, fd in named)
        return launched(folder, fds, NOTIFY_SOCKET=path, FDSTORE="512", **listen)


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        made = Systemd(sock)
        yield made
        made.read()
        made.close()


@contextmanager
def restarted(systemd: Systemd, folder: Path) -> Iterator[Running]:
    with ended(systemd.serve(folder)) as daemon:
        yield daemon
        assert not (folder / runtime_dir.KEEPER).exists()


def kill_one_that_keeps(systemd: Systemd, folder: Path, files: dict[str, Path]) -> None:
    with restarted(systemd, folder) as daemon:
        assert all(was_read(daemon, name, path) for name, path in files.items())
        systemd.await_all()
        daemon.process.kill()
        daemon.process.wait()
    systemd.read()


def test_systemd_holds_them_for_the_next_start(
    folder: Path, files: dict[str, Path], systemd: Systemd
) -> None:
    kill_one_that_keeps(systemd, folder, files)
    for how in (signal.SIGKILL, None):
        systemd.read()
        assert [len(fds) for fds in systemd.held.values()] == [2, 2]
        assert all(name.startswith(NAME) for name in systemd.held)
        with restarted(systemd, folder) as daemon:
            await_kept(daemon)
            assert not any(was_read(daemon, name, path) for name, path in files.items())
            swapd("upgrade", "-e", daemon.folder)
            await_kept(daemon)
            systemd.read()
            assert [len(fds) for fds in systemd.held.values()] == [2, 2]
            if how is not None:
                daemon.process.send_signal(how)
                daemon.process.wait()
    systemd.read()
    assert systemd.held == {}, "it stopped in order"


def test_what_it_holds_and_no_daemon_can_use_is_removed(
    folder: Path, files: dict[str, Path], systemd: Systemd
) -> None:
    kill_one_that_keeps(systemd, folder, files)
    first = next(iter(systemd.held))
    os.close(systemd.held[first].pop())  # its manifest
    with restarted(systemd, folder) as daemon:
        with swapd_client.connect(daemon.folder) as client:
            while [one.name for one in client.status().kept] != ["vae"]:
                pass
            systemd.read()
            assert first not in systemd.held
            before = systemd.barriers
            client.forget()
            while client.status().host_copy_bytes:
                systemd.read()
            systemd.read()
            assert systemd.held == {}
            assert (before, systemd.barriers) == (0, 1), "it was free before systemd let go of it"
        daemon.process.terminate()
        assert daemon.process.stderr is not None
        assert "a kept host copy is dropped: it has no manifest" in daemon.process.stderr.read()
