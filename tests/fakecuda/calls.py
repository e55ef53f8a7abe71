"""The driver's calls for the tests of the fake: short, and raising `Failed`.

Used in pytest's process and in programs of their own: `from tests.fakecuda import calls`.
"""

import ctypes
import mmap
import os
from typing import Any

from cuda.bindings import driver

from tests.threads import started

MIB = 1 << 20
UNIT = 2 * MIB

NONE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
READ = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
WRITE = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
NO_TYPE = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE

INVALID_VALUE = 1
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
ILLEGAL_ADDRESS = 700
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713


class Failed(Exception):
    """A call failed; `code` is the CUresult."""

    def __init__(self, code: int) -> None:
        super().__init__(driver.CUresult(code).name)
        self.code = code


def call(name: str, *arguments: Any) -> Any:
    """The results of a call, without its CUresult. Raises: Failed."""
    code, *values = getattr(driver, name)(*arguments)
    if int(code):
        raise Failed(int(code))
    return values[0] if len(values) == 1 else tuple(values) if values else None


def code_of(name: str, *arguments: Any) -> int:
    """The CUresult of a call, 0 if it succeeded."""
    return int(getattr(driver, name)(*arguments)[0])


def start(device: int = 0) -> None:
    """Initialise, and make a device's primary context current on this thread."""
    call("cuInit", 0)
    use(device)


def use(device: int = 0) -> None:
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device)))


def end(device: int = 0) -> None:
    """Destroy the context that `start` and `use` made current, as other tests of the process make
    theirs."""
    call("cuCtxSetCurrent", 0)
    while not code_of("cuDevicePrimaryCtxRelease", device):
        pass


def properties(device: int = 0, types: Any = FD) -> Any:
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = device
    made.requestedHandleTypes = types
    return made


def create(nbytes: int = UNIT, device: int = 0, types: Any = FD) -> Any:
    return call("cuMemCreate", nbytes, properties(device, types), 0)


def export(handle: Any) -> int:
    return int(call("cuMemExportToShareableHandle", handle, FD, 0))


def reserve(nbytes: int = UNIT) -> int:
    return int(call("cuMemAddressReserve", nbytes, 0, 0, 0))


def description(flags: Any, device: int = 0) -> Any:
    made = driver.CUmemAccessDesc()
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = device
    made.flags = flags
    return made


def access(address: int, nbytes: int, flags: Any, device: int = 0) -> None:
    call("cuMemSetAccess", address, nbytes, [description(flags, device)], 1)


def access_of(address: int, device: int = 0) -> int:
    place = driver.CUmemLocation()
    place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    place.id = device
    return int(call("cuMemGetAccess", place, address))


def mapped(handle: Any, nbytes: int = UNIT, flags: Any = WRITE, device: int = 0) -> int:
    """Reserve, map and open a handle's memory; returns its address."""
    address = reserve(nbytes)
    call("cuMemMap", address, nbytes, 0, handle, 0)
    access(address, nbytes, flags, device)
    return address


def unmapped(address: int, nbytes: int = UNIT) -> None:
    """Undo `mapped`."""
    call("cuMemUnmap", address, nbytes)
    call("cuMemAddressFree", address, nbytes)


def memory(nbytes: int = UNIT, flags: Any = WRITE) -> int:
    """The address of new memory that `unmapped` frees."""
    handle = create(nbytes)
    address = mapped(handle, nbytes, flags)
    call("cuMemRelease", handle)
    return address


def stream() -> Any:
    return call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)


def event(flags: int = 2) -> Any:
    return call("cuEventCreate", flags)


class Host:
    """Host memory with an address; `close` it when nothing uses it any more."""

    def __init__(self, nbytes: int, *, writable: bool = True) -> None:
        fd = os.memfd_create("host")
        os.ftruncate(fd, nbytes)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self.fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes, prot=protection)
        self._address = libc_address(self._map)

    @property
    def address(self) -> int:
        return self._address

    def __setitem__(self, place: slice, data: bytes) -> None:
        self._map[place] = data

    def __getitem__(self, place: slice) -> bytes:
        return self._map[place]

    def pin(self, flags: int = 0) -> "Host":
        call("cuMemHostRegister", self.address, self.nbytes, flags)
        return self

    def unpin(self) -> None:
        call("cuMemHostUnregister", self.address)

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)


def libc_address(mapping: mmap.mmap) -> int:
    """The address of a mapping, writable or not."""

    class Buffer(ctypes.Structure):
        _fields_ = (("start", ctypes.c_void_p), ("rest", ctypes.c_byte * 256))

    buffer = Buffer()
    get = ctypes.pythonapi.PyObject_GetBuffer
    get.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
    get(mapping, ctypes.byref(buffer), 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return int(buffer.start)


class Gate:
    """Holds a stream back until it is opened: the stream waits for a flag in registered memory.
    Work queued behind it has not run, at any time of the test.
    """

    def __init__(self, stream: Any) -> None:
        self._flag = Host(mmap.PAGESIZE).pin()
        call("cuStreamWaitValue64", stream, self._flag.address, 1, 0)

    def open(self) -> None:
        self._flag[0:8] = (1).to_bytes(8, "little")

    def close(self) -> None:
        """Only when the stream is past it."""
        self._flag.unpin()
        self._flag.close()


def in_thread(function: Any) -> Any:
    """The result of `function` on a thread of its own, which has no context."""
    results: list[Any] = []
    started(lambda: results.append(function())).join()
    return results[0]
