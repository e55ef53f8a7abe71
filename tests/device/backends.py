"""The devices that the contract is held against, and how another process gets at a chunk."""

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swapd.device import Device, HostDevice, open_device

CHUNK = 2 << 20

#: Runs first in another process; `sys.argv` is what `arguments` says.
_CHILD = """
import ctypes, sys, zlib
fd, chunk, CHUNK, writable = map(int, sys.argv[1:5])
"""

_ON_HOST = """
from swapd.shared import vm
at = vm.map_shared(fd, chunk * CHUNK, CHUNK, writable=writable)
def read(nbytes):
    return bytes(vm.view(at, nbytes))
def write(content):
    vm.view(at, len(content))[:] = content
"""

_ON_CUDA = """
from swapd.device.driver import Access, Driver
driver = Driver.by_uuid(sys.argv[5])
with driver.current():
    handle = driver.adopt(fd)
    at = driver.reserve(CHUNK)
    driver.map(at, CHUNK, handle)
    driver.set_access(at, CHUNK, Access.READ_WRITE if writable else Access.READ)
    driver.release(handle)
def read(nbytes):
    buffer = ctypes.create_string_buffer(nbytes)
    with driver.current():
        driver.call(driver.api.cuMemcpyDtoH, ctypes.addressof(buffer), at, nbytes)
    return buffer.raw
def write(content):
    buffer = ctypes.create_string_buffer(content, len(content))
    with driver.current():
        driver.call(driver.api.cuMemcpyHtoD, at, ctypes.addressof(buffer), len(content))
"""


@dataclass(frozen=True)
class Backend:
    """How to open a device, and what another process runs to map a chunk of it: afterwards
    it has `read(nbytes)` and `write(content)`. `held` is how much memory its arena takes."""

    open: Callable[[int, int], Device]
    child: str
    held: Callable[[Device], int]
    environment: Mapping[str, str] = field(default_factory=dict)

    def program(self, body: str) -> str:
        return f"{_CHILD}{self.child}{body}"

    def arguments(self, device: Device, fd: int, chunk: int, writable: bool) -> tuple[object, ...]:
        return fd, chunk % device.chunks_per_file, CHUNK, int(writable), device.uuid


def _held_on_host(device: Device) -> int:
    with device.export(0, writable=False) as fd:
        return os.fstat(fd.fileno()).st_blocks * 512


def _held_on_cuda(device: Device) -> int:
    use = device.use()
    return use.total - use.free


HOST = Backend(lambda budget, chunk: HostDevice(budget, chunk), _ON_HOST, _held_on_host)


def cuda(environment: Mapping[str, str]) -> Backend:
    """The first GPU that this process sees; `environment` makes others see it too."""
    return Backend(
        lambda budget, chunk: open_device("cuda", budget, chunk, None),
        _ON_CUDA,
        _held_on_cuda,
        environment,
    )


def gpu_here() -> bool:
    """Whether this machine has an NVIDIA driver; loads none."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


class HostBytes:
    """Private memory as the source or target of copies, with bytes around it to watch."""

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
