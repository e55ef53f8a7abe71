"""One direction of copies on a GPU: a stream and the pieces on it.

The thread that orders a copy enqueues its pieces, at most DEPTH ahead, waits for each in turn and
reports it. So no other thread is woken, and no callback of the driver runs Python.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from swapd.device.base import DeviceError, DeviceLost, Landed
from swapd.device.context import CudaError
from swapd.device.driver import Driver
from swapd.shared import vm
from swapd.shared.units import size

#: Bytes of one copy call from pinned memory: large enough for the full rate, small enough to call
#: `landed` often. On an H200, pieces of 16 MiB with an event each took 2 % longer than one copy,
#: 0.8 % because of their size. Copies of other processes wait for a time slice of the GPU, 1 ms,
#: whatever their size.
PIECE_BYTES = 32 << 20
#: Pieces on the stream at a time: enough to keep the GPU busy while this process waits a
#: millisecond or two for a processor, few enough that an urgent copy waits for 96 MiB at most.
DEPTH = 3
#: Bytes of one copy call through a place of the staging buffer, which has DEPTH places.
STAGED_BYTES = 4 << 20


class Copy(NamedTuple):
    """A piece of a copy, with its addresses on both sides; `done`: bytes of the component before
    it. Without a host address, a piece is zeroed on its way in, and left out on its way out."""

    device: int
    host: int | None
    nbytes: int
    done: int
    #: Whether the GPU can access the host memory directly.
    pinned: bool


class _InFlight(NamedTuple):
    """A piece on the stream. It has landed after `event` and then `arrive`."""

    event: Any
    end: int
    arrive: Callable[[], object] | None


class Direction(ABC):
    """Copies of one direction, one at a time. A subclass enqueues the pieces."""

    def __init__(self, driver: Driver) -> None:
        """Raises: DeviceError; then nothing is left allocated."""
        self._driver = driver
        with driver.current(), ExitStack() as undo:
            self._stream = driver.stream()
            undo.callback(driver.destroy_stream, self._stream)
            self._events = []
            for _ in range(DEPTH):
                self._events.append(event := driver.event())
                undo.callback(driver.destroy_event, event)
            self._staging = _staging(driver)
            undo.callback(driver.free_pinned, self._staging)
            self._made = undo.pop_all()

    def close(self) -> None:
        """No-op if the device is lost. Raises: DeviceError."""
        with suppress(DeviceLost), self._driver.current():
            self._made.close()

    def run(self, copies: Iterator[Copy], landed: Landed | None) -> None:
        """Copy all pieces in order. Blocks. Raises: DeviceError, or a callback's error, once
        nothing is in flight."""
        with self._driver.current():
            try:
                for piece in self._ahead(copies):
                    self._driver.synchronize(piece.event)
                    if piece.arrive is not None:
                        piece.arrive()
                    if landed is not None:
                        landed(piece.end)
            except BaseException:
                self._driver.finish(self._stream)  # the GPU lets go of the memory
                raise

    def _ahead(self, copies: Iterator[Copy]) -> Generator[_InFlight, None, None]:
        """Enqueue pieces, and yield each to wait for. When the caller asks for the next, this one
        has landed: its place is reused."""
        in_flight: deque[_InFlight] = deque()
        for number, copy in enumerate(copies):
            if len(in_flight) == DEPTH:
                yield in_flight.popleft()
            in_flight.append(self._enqueued(copy, number % DEPTH))
        yield from in_flight

    def _enqueued(self, copy: Copy, place: int) -> _InFlight:
        """Put a piece on the stream, with the event and staging buffer of a place, which are free:
        pieces end in order."""
        staging = None if copy.pinned else self._staging + place * STAGED_BYTES
        arrive = self._enqueue(copy, staging)
        self._driver.record(self._events[place], self._stream)
        return _InFlight(self._events[place], copy.done + copy.nbytes, arrive)

    @abstractmethod
    def _enqueue(self, copy: Copy, staging: int | None) -> Callable[[], object] | None:
        """Put a piece on the stream, through `staging` if given; return what is left to do when it
        has arrived."""


def _staging(driver: Driver) -> int:
    nbytes = DEPTH * STAGED_BYTES
    try:
        return driver.allocate_pinned(nbytes)
    except CudaError as exc:
        raise DeviceError(
            f"could not pin a staging buffer of {size(nbytes)} of host memory: {exc}; free "
            "host memory, or raise `ulimit -l` or the container's memory limit"
        ) from exc


class Inward(Direction):
    def zero(self, address: int, nbytes: int) -> None:
        """Zero memory while no copy is in flight. Blocks. Raises: DeviceError."""
        with self._driver.current():
            self._driver.zero_later(address, nbytes, self._stream)
            self._driver.finish(self._stream)

    def _enqueue(self, copy: Copy, staging: int | None) -> None:
        source = copy.host
        if source is None:
            self._driver.zero_later(copy.device, copy.nbytes, self._stream)
            return
        if staging is not None:
            vm.copy(staging, source, copy.nbytes)
            source = staging
        self._driver.copy_to_device(copy.device, source, copy.nbytes, self._stream)


class Outward(Direction):
    def _enqueue(self, copy: Copy, staging: int | None) -> Callable[[], object] | None:
        target = copy.host
        if target is None:
            return None
        if staging is None:
            self._driver.copy_to_host(target, copy.device, copy.nbytes, self._stream)
            return None
        self._driver.copy_to_host(staging, copy.device, copy.nbytes, self._stream)
        return lambda: vm.copy(target, staging, copy.nbytes)
