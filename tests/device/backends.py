"""The devices that the contract is tested on, and how another process maps a chunk."""

import ctypes
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swapd.device import Device, HostDevice, open_device

CHUNK = 2 << 20
#: A driver returns memory late, but within this time.
SETTLE_S = 10.0

#: Run in another process with the `arguments` of a `Backend`.
PROGRAM = Path(__file__).parent / "programs" / "lent_chunk.py"


@dataclass(frozen=True)
class Backend:
    """How to open a device, and its name in `PROGRAM`, which maps a chunk of it in another process.
    `held` returns the size of its arena in memory.
    """

    open: Callable[[int, int], Device]
    kind: str
    held: Callable[[Device], int]
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(
        self, case: str, device: Device, fd: int, chunk: int, writable: bool
    ) -> tuple[object, ...]:
        number = chunk % device.chunks_per_file
        return self.kind, case, fd, number, CHUNK, int(writable), device.uuid

    def comes_to_hold(self, device: Device, nbytes: int) -> bool:
        """Whether its arena takes so much; waits, as a driver may return memory late."""
        until = time.monotonic() + SETTLE_S
        while (held := self.held(device)) != nbytes and time.monotonic() < until:
            time.sleep(0.01)
        return held == nbytes


def _held_on_host(device: Device) -> int:
    with device.export(0, writable=False) as fd:
        return os.fstat(fd.fileno()).st_blocks * 512


def _held_on_cuda(device: Device) -> int:
    use = device.use()
    return use.total - use.free


HOST = Backend(lambda budget, chunk: HostDevice(budget, chunk), "host", _held_on_host)


def cuda(environment: Mapping[str, str]) -> Backend:
    """The first GPU that this process sees; with `environment`, other processes see it, too."""
    return Backend(
        lambda budget, chunk: open_device("cuda", budget, chunk, None),
        "cuda",
        _held_on_cuda,
        environment,
    )


def gpu_here() -> bool:
    """Whether this machine has an NVIDIA driver; loads none."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


class HostBytes:
    """Private memory as the source or target of copies, with guard bytes around it."""

    MARGIN = 4096

    def __init__(self, nbytes: int, content: bytes = b"") -> None:
        self._whole = bytearray(b"\xee" * (nbytes + 2 * self.MARGIN))
        self._view = memoryview(self._whole)[self.MARGIN : self.MARGIN + nbytes]
        self._view[: len(content)] = content
        self.nbytes = nbytes
        array = (ctypes.c_ubyte * len(self._whole)).from_buffer(self._whole)
        self.address = ctypes.addressof(array) + self.MARGIN

    def __bytes__(self) -> bytes:
        around = self._whole[: self.MARGIN], self._whole[self.MARGIN + self.nbytes :]
        assert all(part == b"\xee" * self.MARGIN for part in around), "written beside the target"
        return bytes(self._view)
