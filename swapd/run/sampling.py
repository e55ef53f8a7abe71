"""Samples a command's peak memory: on the host by /proc, on GPUs by NVML.

Host memory is what others cannot use: the private memory of all processes that this process
started, swapped or not, and their shared memory (open memory files), once. Pages of files, which
the kernel can drop, and a driver's own memory do not count.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from swapd.run import gpus
from swapd.shared.config import gpu_number

_PROC = Path("/proc")
_SHARE = 0.05
EVERY_S = 0.1
_SHARED = ("/memfd:", "/dev/shm/")
_COUNTED = (b"RssAnon", b"VmSwap", b"RssShmem")
_BLOCK = 512


class Sampler:
    """The peak since its creation. `pause_s`: seconds until the next sample is due."""

    def __init__(self, devices: Sequence[str]) -> None:
        #: None if the command ended before its first sample.
        self.host_bytes: int | None = None
        #: Increase since the beginning, on all devices together; None if unknown.
        self.device_bytes: int | None = None
        self.pause_s = 0.0
        self._gpus = [gpus.nvml_of(one) for one in devices if gpu_number(one) is not None]
        self._before = self._used()

    def sample(self) -> None:
        began = time.monotonic()
        if on_host := host_bytes(descendants(os.getpid())):
            self.host_bytes = max(self.host_bytes or 0, on_host)
        used = self._used()
        if used is not None and self._before is not None:
            self.device_bytes = max(self.device_bytes or 0, used - self._before)
        self.pause_s = max(EVERY_S, (time.monotonic() - began) / _SHARE)

    def _used(self) -> int | None:
        found = [gpu.memory() for gpu in self._gpus]
        return sum(int(one.used) for one in found) if found and None not in found else None


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in os.scandir(_PROC):
        if folder.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                stat = Path(folder.path, "stat").read_bytes()
                parent = int(stat.rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found, ahead = [], [pid]
    while ahead:
        more = children.get(ahead.pop(), [])
        found += more
        ahead += more
    return found


def host_bytes(pids: Sequence[int]) -> int:
    """A process that ends meanwhile counts in part."""
    private, mapped = 0, 0
    files: dict[tuple[int, int], int] = {}
    for pid in pids:
        with suppress(OSError, ValueError):
            own, shared = _memory(pid)
            private += own
            mapped = max(mapped, shared)
        with suppress(OSError):
            files.update(_shared(pid))
    return private + max(mapped, sum(files.values()))


def _memory(pid: int) -> tuple[int, int]:
    said = dict(
        line.split(b":", 1) for line in (_PROC / str(pid) / "status").read_bytes().splitlines()
    )
    own, swapped, shared = (int(said.get(name, b"0 kB").split()[0]) << 10 for name in _COUNTED)
    return own + swapped, shared


def _shared(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    for fd in os.scandir(_PROC / str(pid) / "fd"):
        with suppress(OSError):
            if os.readlink(fd.path).startswith(_SHARED):
                found = os.stat(fd.path)
                yield (found.st_dev, found.st_ino), found.st_blocks * _BLOCK
