"""One direction of copies on a GPU: a stream, and the pieces that are on it.

The thread that orders a copy enqueues its pieces, at most DEPTH ahead. The direction's own
thread waits for each in turn and tells of it, so that what has arrived is told also while
the first thread is held up. It sleeps in the driver meanwhile; no callback of the driver's
runs Python.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

from swapd.device.base import DeviceError, DeviceLost, Landed, MayWrite
from swapd.device.driver import CudaError, Driver
from swapd.shared import vm
from swapd.shared.limits import Pool
from swapd.shared.units import size

#: Copied by one call from pinned memory: large enough for the full rate, small enough for
#: `landed` to come often, and for others' small copies to get in between.
PIECE_BYTES = 16 << 20
#: The same through the staging buffer, which has DEPTH places of this size.
STAGED_BYTES = 4 << 20
#: Pieces on the stream at a time.
DEPTH = 4


class Copy(NamedTuple):
    """A piece of a copy: addresses on both sides. `done` bytes of the component are before it.

    Without a host address it is no copy: inward the piece is zeroed, outward it is left out.
    """

    device: int
    host: int | None
    nbytes: int
    done: int
    chunk: int
    #: Whether the GPU can reach the host memory itself.
    pinned: bool


class _Flying(NamedTuple):
    """A piece on the stream. When `event` has come, `arrive` is run, and then it has landed."""

    event: Any
    end: int
    arrive: Callable[[], object] | None


class _Flight:
    """One copy's pieces on the stream: enqueued by one thread, waited for by another."""

    def __init__(self) -> None:
        self.pieces: SimpleQueue[_Flying | None] = SimpleQueue()
        self.places = threading.Semaphore(DEPTH)
        #: What the waiting thread met; the enqueuing one then stops.
        self.error: BaseException | None = None


class Direction(ABC):
    """Copies of one direction, one at a time. Subclasses say how a piece is enqueued."""

    def __init__(self, driver: Driver, name: str) -> None:
        """Make stream, events and staging buffer. Raises: DeviceError; then nothing is left."""
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
        self._waiter = Pool(1, f"swapd-{name}")

    def close(self) -> None:
        """Free what was made; nothing if the device is lost. Raises: DeviceError."""
        self._waiter.shutdown()
        with suppress(DeviceLost), self._driver.current():
            self._made.close()

    def run(
        self, copies: Iterator[Copy], may_write: MayWrite | None, landed: Landed | None
    ) -> None:
        """Copy all pieces in order. Blocks. Raises: DeviceError, or what a callback raised,
        when nothing is in flight any more."""
        flight = _Flight()
        waiting = self._waiter.submit(self._wait_for_each, flight, landed)
        try:
            with self._driver.current():
                self._enqueue_each(copies, may_write, flight)
        except BaseException:
            flight.pieces.put(None)
            waiting.result()
            self._drain()
            raise
        flight.pieces.put(None)
        waiting.result()
        if flight.error is not None:
            self._drain()
            raise flight.error

    def _enqueue_each(
        self, copies: Iterator[Copy], may_write: MayWrite | None, flight: _Flight
    ) -> None:
        chunk = -1
        for number, copy in enumerate(copies):
            if may_write is not None and copy.chunk != chunk:
                may_write(copy.chunk)
            chunk = copy.chunk
            flight.places.acquire()
            if flight.error is not None:
                return
            # free again: pieces end in order, so the one that had this place has landed
            place = number % DEPTH
            staging = None if copy.pinned else self._staging + place * STAGED_BYTES
            arrive = self._enqueue(copy, staging)
            self._driver.record(self._events[place], self._stream)
            flight.pieces.put(_Flying(self._events[place], copy.done + copy.nbytes, arrive))

    @abstractmethod
    def _enqueue(self, copy: Copy, staging: int | None) -> Callable[[], object] | None:
        """Put a piece on the stream, by way of `staging` if there is one; what is left to do
        when it has arrived."""

    def _wait_for_each(self, flight: _Flight, landed: Landed | None) -> None:
        """Wait for pieces until there are no more, and tell of each. Keeps its error."""
        try:
            with self._driver.current():
                while (piece := flight.pieces.get()) is not None:
                    self._driver.synchronize(piece.event)
                    if piece.arrive is not None:
                        piece.arrive()
                    if landed is not None:
                        landed(piece.end)
                    flight.places.release()
        except BaseException as exc:  # noqa: BLE001 - raised by `run`
            flight.error = exc
            flight.places.release()  # the other thread may be waiting for one

    def _drain(self) -> None:
        """After an error: nobody may touch the memory before the GPU has let go of it."""
        with suppress(DeviceError), self._driver.current():
            self._driver.finish(self._stream)


def _staging(driver: Driver) -> int:
    nbytes = DEPTH * STAGED_BYTES
    try:
        return driver.allocate_pinned(nbytes)
    except CudaError as exc:
        raise DeviceError(
            f"not even a buffer of {size(nbytes)} of host memory could be pinned: {exc}; free "
            "host memory, or raise `ulimit -l` or the container's memory limit"
        ) from exc


class Inward(Direction):
    """Host memory to chunks."""

    def zero(self, address: int, nbytes: int) -> None:
        """Zero what no copy is on. Blocks. Raises: DeviceError."""
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
    """Chunks to host memory."""

    def _enqueue(self, copy: Copy, staging: int | None) -> Callable[[], object] | None:
        target = copy.host
        if target is None:
            return None
        if staging is None:
            self._driver.copy_to_host(target, copy.device, copy.nbytes, self._stream)
            return None
        self._driver.copy_to_host(staging, copy.device, copy.nbytes, self._stream)
        return lambda: vm.copy(target, staging, copy.nbytes)
