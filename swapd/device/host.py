"""The device where there is no GPU: the same contract on a memfd, with real bytes.

The default without a GPU, and the test double everywhere: real memory, real mappings in
real processes, real faults. `bandwidth` makes it as slow as a bus.
"""

import fcntl
import itertools
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from swapd.device import vm
from swapd.device.base import DeviceError
from swapd.fds import OwnedFd, reopen_read_only
from swapd.protocol import Runs

#: Copied by one thread at a time: large enough for memcpy to stream, small enough to share.
PIECE_BYTES = 8 << 20
#: The same when throttled: small, so that the rate is even.
SLOW_PIECE_BYTES = 1 << 20
#: More threads do not copy faster: the memory bus is full.
COPY_THREADS_MAX = 4


def available_bytes() -> int:
    """Host memory that can still be had: the kernel's estimate, or the cgroup's if less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    estimate = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return estimate
    return estimate if limit == "max" else min(estimate, int(limit) - used)


class HostDevice:
    """An arena in host memory. See `swapd.device.base.Device` for the contract."""

    name = "host"

    def __init__(self, budget: int, chunk: int, bandwidth: float | None = None) -> None:
        """Allocate `budget // chunk` chunks and touch them all.

        Units: bytes, bytes, bytes per second. Raises: DeviceError.
        """
        if chunk <= 0 or chunk % (2 << 20):
            raise DeviceError(f"chunk of {chunk} bytes: use a multiple of 2 MiB")
        if budget < chunk:
            raise DeviceError(f"budget of {budget} bytes is less than one chunk of {chunk}")
        self.chunk_bytes = chunk
        self.chunks = budget // chunk
        self._bandwidth = bandwidth
        self._nbytes = self.chunks * chunk
        if self._nbytes > (free := available_bytes()):
            raise DeviceError(
                f"budget of {self._nbytes >> 20} MiB, but only {free >> 20} MiB of host memory "
                "are available; lower --budget"
            )
        try:
            self._allocate()
        except OSError as exc:
            raise DeviceError(f"arena of {self._nbytes >> 20} MiB: {exc.strerror}") from exc
        threads = min(COPY_THREADS_MAX, os.cpu_count() or 1)
        self._helpers = ThreadPoolExecutor(threads, "swapd-copy")
        self._threads = threads

    def __repr__(self) -> str:
        return f"<HostDevice {self._nbytes >> 20} MiB in {self.chunks} chunks>"

    def _allocate(self) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        with ExitStack() as undo:
            self._fd = undo.enter_context(OwnedFd(os.memfd_create("swapd-arena", flags)))
            fd = self._fd.fileno()
            os.ftruncate(fd, self._nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            # opened here and now: a worker may change the memfd's mode, and so shut it for later
            self._reader = undo.enter_context(reopen_read_only(fd))
            self._base = vm.map_shared(fd, 0, self._nbytes, writable=True)
            undo.callback(vm.free, self._base, self._nbytes)
            vm.prefer_huge_pages(self._base, self._nbytes)
            vm.populate(self._base, self._nbytes, writable=True)
            self._memory = undo.pop_all()

    def export(self, *, writable: bool) -> OwnedFd:
        return OwnedFd(os.dup((self._fd if writable else self._reader).fileno()))

    def copy_in(self, runs: Runs, source: int, nbytes: int) -> None:
        self._copy([(self._base + at, source + i, n) for at, i, n in self._spans(runs, nbytes)])

    def copy_out(self, runs: Runs, target: int, nbytes: int) -> None:
        self._copy([(target + i, self._base + at, n) for at, i, n in self._spans(runs, nbytes)])

    def close(self) -> None:
        self._helpers.shutdown()
        self._memory.close()

    def _spans(self, runs: Runs, nbytes: int) -> list[tuple[int, int, int]]:
        """(offset in the arena, offset in the component, length) of each piece."""
        piece = SLOW_PIECE_BYTES if self._bandwidth else PIECE_BYTES
        spans = []
        done = 0
        for first, n in runs:
            start = first * self.chunk_bytes
            length = min(n * self.chunk_bytes, nbytes - done)
            spans += [
                (start + i, done + i, min(piece, length - i)) for i in range(0, length, piece)
            ]
            done += length
        if done < nbytes:
            raise DeviceError(f"{nbytes} bytes do not fit into chunks {runs}")
        return spans

    def _copy(self, pieces: list[tuple[int, int, int]]) -> None:
        if self._bandwidth:
            self._copy_slowly(pieces, self._bandwidth)
            return
        todo = deque(pieces)
        helpers = [
            self._helpers.submit(_drain, todo)
            for _ in itertools.repeat(None, min(self._threads, len(pieces)) - 1)
        ]
        _drain(todo)
        for helper in helpers:
            helper.result()

    def _copy_slowly(self, pieces: list[tuple[int, int, int]], bandwidth: float) -> None:
        started = time.monotonic()
        done = 0
        for target, source, n in pieces:
            vm.copy(target, source, n)
            done += n
            ahead = started + done / bandwidth - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)


def _drain(todo: deque[tuple[int, int, int]]) -> None:
    """Copy pieces until none are left; several threads may share one deque."""
    while True:
        try:
            target, source, n = todo.popleft()
        except IndexError:
            return
        vm.copy(target, source, n)
