"""Guarantee 5: no accident takes one session's memory to another session, or to a file.

Core dumps contain no weights, chunks contain no old bytes, and memory lent for reading cannot be
opened for writing.
"""

import ctypes
import mmap
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import swapd_client
from swapd import spawn
from swapd.shared.fds import OwnedFd
from swapd_client import Client, Component

MIB = 1 << 20
CHUNK = 2 * MIB
PROGRAM = Path(__file__).parent / "programs" / "secrets_in_memory.py"


@pytest.fixture
def daemon() -> Iterator[spawn.Spawned]:
    with spawn.daemon(budget=2 * CHUNK, chunk=CHUNK, isolation="strict") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: spawn.Spawned) -> Iterator[Client]:
    with swapd_client.connect(daemon.folder) as client:
        yield client


# --- core dumps --------------------------------------------------------------------------


def flags_of(pid: int | str) -> Iterator[tuple[int, int, str, list[str]]]:
    """(begin, end, file, flags) of each mapping of a process."""
    begin, end, what = 0, 0, ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) (.*)", line):
            begin, end, what = int(head[1], 16), int(head[2], 16), head[3]
        elif line.startswith("VmFlags:"):
            yield begin, end, what, line.split()[1:]


def in_cores(pid: int | str, *ranges: tuple[int, int]) -> list[str]:
    """Mappings of weights that a core dump of the process would contain."""
    found = []
    for begin, end, what, flags in flags_of(pid):
        within = any(begin < stop and start < end for start, stop in ranges)
        if "dd" not in flags and (within or ("memfd:swapd-" in what and "-board" not in what)):
            found.append(f"{begin:x}-{end:x} {what}")
    return found


def range_of(component: Component) -> tuple[int, int]:
    part = component._part
    return part.address, part.address + part.span


@pytest.mark.parametrize("mutable", [False, True])
def test_no_core_of_a_worker_or_the_daemon_has_weights(
    daemon: spawn.Spawned, mutable: bool
) -> None:
    with swapd_client.connect(daemon.folder) as client:
        module = torch.nn.Linear(500, 500)
        part = client.register("a", module, mutable=mutable)
        other = client.register("b", {"x": os.urandom(CHUNK + 1)}, mutable=mutable)
        where = range_of(part), range_of(other)
        for _ in range(2):
            for name in ("a", "b"):
                assert in_cores("self", *where) == []
                with client.acquire(name):
                    assert in_cores("self", *where) == []
                    assert in_cores(daemon.process.pid) == []
        if not mutable:
            client.update("a", {"weight": torch.ones(500, 500)})
            with client.acquire("a"):
                assert in_cores("self", *where) == []
        client.unregister("a")
        assert in_cores("self", *where) == []
        assert in_cores(daemon.process.pid) == []
    assert in_cores("self", *where) == []


def test_a_core_that_is_written_has_no_weights(daemon: spawn.Spawned, tmp_path: Path) -> None:
    """If the kernel writes core dumps into the folder of the process."""
    command = [sys.executable, str(PROGRAM), "abort", str(daemon.folder)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT, done.stderr
    secret = bytes(range(1, 65)).hex().encode()
    for core in tmp_path.iterdir():
        assert core.read_bytes().count(secret) < 1000, "more than what malloc had"


# --- chunks ------------------------------------------------------------------------------


def test_a_session_finds_nothing_of_anothers_in_the_rest_of_its_last_chunk(
    daemon: spawn.Spawned, client: Client
) -> None:
    client.register("secret", {"x": b"\xaa" * (2 * CHUNK)})
    with swapd_client.connect(daemon.folder) as other:
        part = other.register("small", {"x": b"1234"})
        for _ in range(2):
            with client.acquire("secret"):
                pass
            client.status()
            with other.acquire("small"):
                whole = ctypes.string_at(part.address, CHUNK)
            assert whole == b"1234".ljust(CHUNK, b"\0")
            other.status()


def test_nothing_of_a_mutable_component_is_left_for_the_next(
    daemon: spawn.Spawned, client: Client
) -> None:
    written = client.register("secret", {"x": bytes(100)}, mutable=True)
    filler = client.register("filler", {"x": bytes(CHUNK)})
    with client.acquire("secret"), client.acquire("filler"):
        ctypes.memset(written.address, 0xAA, CHUNK)  # all memory within its reach
    assert filler.nbytes == CHUNK
    with swapd_client.connect(daemon.folder) as other:
        part = other.register("small", {"x": bytes(CHUNK + 4)})
        with other.acquire("small"):
            assert ctypes.string_at(part.address, 2 * CHUNK) == bytes(2 * CHUNK)


def test_a_workspace_takes_what_was_there_with_it(daemon: spawn.Spawned, client: Client) -> None:
    client.register("secret", {"x": b"\xaa" * (2 * CHUNK)})
    with client.acquire("secret"):
        pass
    with client.acquire_workspace(2 * CHUNK):
        pass
    with swapd_client.connect(daemon.folder) as other:
        part = other.register("small", {"x": b"1"})
        with other.acquire("small"):
            assert ctypes.string_at(part.address, CHUNK) == b"1".ljust(CHUNK, b"\0")


# --- descriptors -------------------------------------------------------------------------


def opened_again(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def test_a_host_copy_is_not_written_to_however_it_is_opened(client: Client) -> None:
    part = client.register("a", {"x": b"1234"})._part
    assert part.master is not None
    with OwnedFd(opened_again(part.master.fileno())) as again:
        for fd in (part.master.fileno(), again.fileno()):
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 4, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)


def test_what_is_lent_to_be_read_does_not_open_for_writing() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "open_for_writing"], capture_output=True, text=True
    )
    assert done.stdout == "Permission denied\nPermission denied\n", done.stderr
