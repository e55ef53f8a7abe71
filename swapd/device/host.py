"""The device without a GPU, and the test double: the same contract on a memfd, with real memory,
mappings and faults. `bandwidth` makes it as slow as a bus."""

import fcntl
import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from swapd.device.base import (
    DeviceError,
    Landed,
    MemoryUse,
    Tails,
    chunks_in,
    cut,
    mark,
    numbers,
    split,
)
from swapd.shared import vm
from swapd.shared.fds import OwnedFd, reopen_read_only
from swapd.shared.protocol import Ranges, Runs
from swapd.shared.system import Threads
from swapd.shared.units import size

#: Large enough for memcpy to stream, small enough for threads to share.
PIECE_BYTES = 8 << 20
#: With `bandwidth`: small, so that the rate is even.
SLOW_PIECE_BYTES = 1 << 20
#: More threads copy no faster, because the memory bus is full.
COPY_THREADS_MAX = 4


def available_bytes() -> int:
    """Return the available host memory: the kernel's estimate, or what the control groups leave if
    that is less. Raises: DeviceError."""
    estimate = _meminfo("MemAvailable")
    return min(estimate, available(estimate))


def total_bytes() -> int:
    """Return the host memory, or the least limit of the control groups. Raises: DeviceError."""
    total = _meminfo("MemTotal")
    group = least_limit()
    return total if group is None else min(total, group.limit)


def _meminfo(field: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError as exc:
        raise DeviceError(f"the size of host memory is unknown: {exc}") from exc
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[field].split()[0]) * 1024


class HostDevice:
    """An arena in host memory. See `swapd.device.base.Device` for the contract."""

    name = "host"
    uuid = ""
    missing: Runs = ()
    outlasts = False
    read_only_pins = True

    def __init__(self, budget: int, chunk: int, bandwidth: float | None = None) -> None:
        """Allocate and touch `budget // chunk` chunks. `budget` and `chunk` are in bytes,
        `bandwidth` in bytes per second. Raises: DeviceError."""
        self.chunk_bytes = chunk
        self.chunks = self.chunks_per_file = chunks_in(budget, chunk, unit=2 << 20)
        self._bandwidth = bandwidth
        self._nbytes = self.chunks * chunk
        if self._nbytes > (free := available_bytes()):
            raise DeviceError(
                f"budget of {size(budget)}, but only {size(free)} of host memory "
                "are available; lower --budget"
            )
        try:
            self._allocate()
        except OSError as exc:
            raise DeviceError(f"arena of {self._nbytes >> 20} MiB: {exc.strerror}") from exc
        self._tails = Tails(self.chunks, chunk)
        self._threads = min(COPY_THREADS_MAX, os.cpu_count() or 1)
        # all threads of one direction may wait for the other
        self._helpers = Threads(2 * self._threads, "swapd-copy")

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
            # opened now: a worker may change the memfd's mode, and so prevent it later
            self._reader = undo.enter_context(reopen_read_only(fd))
            # so that a process with the reader does not open it again for writing by mistake. Its
            # owner can change the mode back: no seal can forbid that, because mutable components
            # are written to
            os.fchmod(fd, 0o400)
            self._base = vm.map_shared(fd, 0, self._nbytes, writable=True)
            undo.callback(vm.free, self._base, self._nbytes)
            vm.prefer_huge_pages(self._base, self._nbytes)
            vm.populate(self._base, self._nbytes, writable=True)
            self._memory = undo.pop_all()

    def export(self, file: int, *, writable: bool) -> OwnedFd:
        assert file == 0, f"file {file} of an arena with one file"
        self._tails.writable |= writable
        return OwnedFd(os.dup((self._fd if writable else self._reader).fileno()))

    def pin(self, address: int, nbytes: int, *, writable: bool) -> None:
        """No-op."""

    def pinned(self) -> None:
        """Return None: copies need no pinned memory."""

    def unpin(self, address: int) -> None:
        """No-op."""

    def copy_in(
        self,
        runs: Runs,
        source: int,
        nbytes: int,
        *,
        only: Ranges | None = None,
        start: int = 0,
        landed: Landed | None = None,
    ) -> None:
        landed = landed or _tell_nobody
        whole = cut(runs, nbytes, self.chunk_bytes)
        tail = self._tails.begin(whole)
        strips = [
            _Strip(inside, outside if copied else None, length, end)
            for inside, outside, length, end, copied in self._cut(runs, nbytes, only, source)
            if end > start
        ]
        self._copy(_Job(strips, landed))
        if not strips:
            landed(nbytes)
        if tail is not None:
            vm.zero(self._base + tail.offset, tail.nbytes)
        self._tails.end(whole)

    def copy_out(
        self,
        runs: Runs,
        target: int,
        nbytes: int,
        *,
        only: Ranges | None = None,
    ) -> None:
        strips = [
            _Strip(outside, inside, length, end)
            for inside, outside, length, end, copied in self._cut(runs, nbytes, only, target)
            if copied
        ]
        self._copy(_Job(strips, _tell_nobody))

    def lend(self, runs: Runs) -> None:
        try:
            for first, n in runs:
                vm.punch(self._fd.fileno(), first * self.chunk_bytes, n * self.chunk_bytes)
        except OSError as exc:
            raise DeviceError(f"chunks {runs} cannot be lent: {exc.strerror}") from exc

    def reclaim(self, runs: Runs) -> None:
        nbytes = len(numbers(runs)) * self.chunk_bytes
        # else the kernel might kill a process, perhaps this one, to find the memory
        if nbytes > (free := available_bytes()):
            raise DeviceError(
                f"cannot take {nbytes >> 20} MiB back: only {free >> 20} MiB of host "
                "memory are available"
            )
        try:
            for first, n in runs:
                start = self._base + first * self.chunk_bytes
                vm.populate(start, n * self.chunk_bytes, writable=True)
        except OSError as exc:
            self.lend(runs)
            raise DeviceError(f"cannot take chunks {runs} back: {exc.strerror}") from exc

    def use(self) -> MemoryUse:
        return MemoryUse(total_bytes(), available_bytes(), (), ())

    def close(self) -> None:
        self._helpers.shutdown()
        self._memory.close()

    def _cut(
        self, runs: Runs, nbytes: int, only: Ranges | None, host: int
    ) -> Iterator[tuple[int, int, int, int, bool]]:
        """Yield the pieces of a copy: addresses in the arena and outside, bytes, the bytes complete
        after it, whether `only` has it."""
        most = SLOW_PIECE_BYTES if self._bandwidth else PIECE_BYTES
        for marked, copied in mark(cut(runs, nbytes, self.chunk_bytes), only):
            for offset, done, length in split([marked], most):
                yield self._base + offset, host + done, length, done + length, copied

    def _copy(self, job: "_Job") -> None:
        helpers = []
        if not self._bandwidth:
            wanted = min(self._threads, len(job.strips)) - 1
            helpers = [self._helpers.submit(job.work) for _ in range(wanted)]
        job.work(self._bandwidth)
        for helper in helpers:
            helper.result()
        if job.error is not None:
            raise job.error


def _tell_nobody(nbytes: int) -> None:
    pass


class _Strip(NamedTuple):
    """Bytes to copy, or to zero without a source. `end`: bytes of the copy complete after it."""

    target: int
    source: int | None
    nbytes: int
    end: int


class _Job:
    """One copy by several threads: they take strips in order, and report them in order."""

    def __init__(self, strips: list[_Strip], landed: Landed) -> None:
        self.strips = strips
        self._landed = landed
        self._next = itertools.count()
        self._telling = threading.Lock()
        self._done = [False] * len(strips)
        self._told = 0
        #: First error; the other threads stop at their next strip.
        self.error: BaseException | None = None

    def work(self, bandwidth: float | None = None) -> None:
        """Copy strips until they run out or a thread fails, at most `bandwidth` bytes per
        second."""
        due = time.monotonic()
        for index in self._next:
            if index >= len(self.strips) or self.error is not None:
                return
            target, source, nbytes, _ = self.strips[index]
            if source is None:
                vm.zero(target, nbytes)
            else:
                vm.copy(target, source, nbytes)
                if bandwidth:
                    due += nbytes / bandwidth
                    time.sleep(max(due - time.monotonic(), 0))
            self._tell(index)

    def _tell(self, index: int) -> None:
        """Report strips that are done, in order; nothing after an error."""
        with self._telling:
            self._done[index] = True
            try:
                while self.error is None and self._is_next_done():
                    self._told += 1
                    self._landed(self.strips[self._told - 1].end)
            except BaseException as exc:  # noqa: BLE001 - raised by the caller of all threads
                self.error = exc

    def _is_next_done(self) -> bool:
        return self._told < len(self.strips) and self._done[self._told]


# --- the memory that control groups leave this process: its own group, and all above it -----------


_SELF = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
#: Limit and use of memory, in version 2 and 1 of control groups; prefix of statistics.
_FILES_2 = ("memory.max", "memory.current", "")
_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
#: Version 1 shows no limit as the largest number of whole pages in 63 bits.
_NO_LIMIT = 1 << 62


class Group(NamedTuple):
    """A control group with a limit on memory, in bytes. `path`: its folder. `used`: without pages
    of files, which the kernel drops before it refuses memory."""

    path: Path
    limit: int
    used: int


def groups() -> list[Group]:
    """Return this process's groups that have a limit; a container may see only its own. Raises
    nothing."""
    return [group for path, files in _folders() if (group := _group(path, files)) is not None]


def least_limit() -> Group | None:
    return min(groups(), key=lambda group: group.limit, default=None)


def available(nbytes: int) -> int:
    return min((group.limit - group.used for group in groups()), default=nbytes)


def _folders() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders and files of this process's groups, from its own up to the mount."""
    lines = ["0::/", "1:memory:/"]
    with suppress(OSError):
        lines += _SELF.read_text().splitlines()
    seen = set()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, files = (_MOUNT / "memory", _FILES_1) if controllers else (_MOUNT, _FILES_2)
        # a path above the root of this process's namespace begins with ".."
        below = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(below), -1, -1):
            group = mount.joinpath(*below[:depth]), files
            if group not in seen:
                seen.add(group)
                yield group


def _group(path: Path, files: tuple[str, str, str]) -> Group | None:
    *of_memory, prefix = files
    try:
        limit, used = (int((path / name).read_text()) for name in of_memory)
    except (OSError, ValueError):  # not there, or the limit is "max"
        return None
    return Group(path, limit, used - _cached(path, prefix)) if limit < _NO_LIMIT else None


def _cached(path: Path, prefix: str) -> int:
    lines: list[str] = []
    with suppress(OSError):
        lines = (path / "memory.stat").read_text().splitlines()
    of_files = (f"{prefix}active_file ", f"{prefix}inactive_file ")
    return sum(int(line.split()[1]) for line in lines if line.startswith(of_files))
