"""Another process with a chunk of a device.

`python lent_chunk.py KIND CASE FD CHUNK NBYTES WRITABLE UUID` maps chunk CHUNK of the file FD, on a
device of this KIND, host or cuda, and runs the function CASE.
"""

import ctypes
import sys
import zlib
from abc import ABC, abstractmethod

from swapd.device.driver import Access, Driver
from swapd.shared import vm


class Chunk(ABC):
    """A mapped chunk."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @abstractmethod
    def read(self) -> bytes: ...

    @abstractmethod
    def write(self, content: bytes) -> None: ...


class HostChunk(Chunk):
    def __init__(self, fd: int, chunk: int, nbytes: int, writable: bool) -> None:
        super().__init__(nbytes)
        self._at = vm.map_shared(fd, chunk * nbytes, nbytes, writable=writable)

    def read(self) -> bytes:
        return bytes(vm.view(self._at, self.nbytes))

    def write(self, content: bytes) -> None:
        vm.view(self._at, len(content))[:] = content


class CudaChunk(Chunk):
    def __init__(self, fd: int, nbytes: int, writable: bool, uuid: str) -> None:
        super().__init__(nbytes)
        self._driver = driver = Driver.by_uuid(uuid)
        with driver.current():
            handle = driver.adopt(fd)
            self._at = driver.reserve(nbytes)
            driver.map(self._at, nbytes, handle)
            access = Access.READ_WRITE if writable else Access.READ
            driver.set_access(self._at, nbytes, access)
            driver.release(handle)

    def read(self) -> bytes:
        driver, buffer = self._driver, ctypes.create_string_buffer(self.nbytes)
        target = ctypes.addressof(buffer)
        with driver.current():
            driver.call(driver.api.cuMemcpyDtoH, target, self._at, self.nbytes)
        return buffer.raw

    def write(self, content: bytes) -> None:
        driver, buffer = self._driver, ctypes.create_string_buffer(content, len(content))
        source = ctypes.addressof(buffer)
        with driver.current():
            driver.call(driver.api.cuMemcpyHtoD, self._at, source, len(content))


def checksum(chunk: Chunk) -> None:
    print(zlib.crc32(chunk.read()))  # noqa: T201


def hello(chunk: Chunk) -> None:
    chunk.write(b"hello")


def fill(chunk: Chunk) -> None:
    chunk.write(b"x" * chunk.nbytes)


def stray(chunk: Chunk) -> None:
    """Write to memory that is read-only, and print the result."""
    try:
        chunk.write(b"stray")
    except Exception as exc:  # noqa: BLE001 - any error
        print(exc)  # noqa: T201


def keep(chunk: Chunk) -> None:
    """Keep it until a line comes on stdin, then print its checksum."""
    print("mapped", flush=True)  # noqa: T201
    sys.stdin.readline()
    checksum(chunk)


def main(kind: str, case: str, *arguments: str) -> None:
    fd, number, nbytes, writable = map(int, arguments[:4])
    if kind == "host":
        chunk: Chunk = HostChunk(fd, number, nbytes, bool(writable))
    else:
        chunk = CudaChunk(fd, nbytes, bool(writable), arguments[4])
    globals()[case](chunk)


if __name__ == "__main__":
    main(*sys.argv[1:])
