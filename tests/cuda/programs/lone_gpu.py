"""A GPU for one process alone, and chunks on it, made and sent as a daemon does."""

import ctypes
from collections.abc import Callable
from typing import Any

from swapd.device.driver import Access, Driver
from swapd.shared import protocol
from swapd_client.session.gpu import GpuRange
from swapd_client.session.gpu.card import Card
from swapd_client.session.life import Files

CHUNK, NBYTES = 2 << 20, (4 << 20) + 5000


class LoneGpu:
    """Chunks 0 to 7; each byte is 100 + the chunk's number. And the client's side of the card."""

    def __init__(self) -> None:
        self.daemon = Driver(0)
        self._handles: dict[int, int] = {}
        self.files = Files(1)
        welcome = protocol.Welcome(2, 1, b"", "", "cuda:0", CHUNK, 8, True, 1, self.daemon.uuid)
        self.card = Card(welcome, self.files)
        for number in range(8):
            self.make(number)

    def range(self, *, writable: bool = False, before: GpuRange | None = None) -> GpuRange:
        """A range of three chunks; the last one is not full."""
        return GpuRange(NBYTES, self.card, writable=writable, before=before)

    def make(self, number: int) -> None:
        with self.daemon.current():
            self._handles[number] = handle = self.daemon.create(CHUNK)
            at = self.daemon.reserve(CHUNK)
            self.daemon.map(at, CHUNK, handle)
            self.daemon.set_access(at, CHUNK, Access.READ_WRITE)
            self.daemon.call(self.daemon.api.cuMemsetD8, at, 100 + number, CHUNK)
            self.daemon.unmap(at, CHUNK)
            self.daemon.free(at, CHUNK)

    def send(self, *numbers: int, writable: bool = False) -> None:
        with self.daemon.current():
            fds = [self.daemon.export(self._handles[n]) for n in numbers]
        self.files.add(protocol.Files(numbers, writable), fds)

    def lend(self, *numbers: int) -> None:
        """Drop these chunks, like a daemon that relies on its client to drop them."""
        with self.daemon.current():
            for number in numbers:
                self.daemon.release(self._handles.pop(number))

    def free(self) -> int:
        with self.daemon.current():
            return self.daemon.memory()[0]

    def look(self, where: GpuRange) -> list[int]:
        """The chunk behind each part of the range, by the first byte, which the GPU reads."""
        buffer = (ctypes.c_ubyte * 1)()
        target, found = ctypes.addressof(buffer), []
        with self.daemon.current():
            for at in range(where.address, where.address + where.nbytes, CHUNK):
                self.daemon.call(self.daemon.api.cuMemcpyDtoH, target, at, 1)
                found.append(buffer[0] - 100)
        return found


def refused(kind: type[Exception], call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The message of the exception of this kind that the call must raise."""
    try:
        call(*args, **options)
    except kind as exc:
        return str(exc)
    raise AssertionError("not refused")


def put(owner: type, name: str, method: Callable[..., Any]) -> Any:
    """Replace a method by another. Returns the replaced one."""
    real = getattr(owner, name)
    setattr(owner, name, method)
    return real


def count(*names: str) -> dict[str, int]:
    """The number of calls of each of these methods of a `Driver`, from now on."""
    calls = dict.fromkeys(names, 0)

    def count_one(name: str) -> None:
        def counted(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return real(*args, **options)

        real = put(Driver, name, counted)

    for name in names:
        count_one(name)
    return calls
