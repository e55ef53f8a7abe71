"""Lends device memory to a worker's own allocator, and takes it back; or exchanges it for other
memory.

Before the driver can have it, every session must let go of it: memory is free at the last
reference. The events `Dropping` and `Dropped` say which sessions were told, and which have let go;
the core decides how long to wait for one. Decides nothing. `lend` comes back as exactly one event
that ends it. So does `reclaim`, though it may take as long as the worker's allocator keeps the
memory.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from swapd.core.actions import Lend, Reclaim
from swapd.core.events import (
    AnyEvent,
    CopyFailed,
    DeviceDown,
    Dropped,
    Dropping,
    Lent,
    Reclaimed,
)
from swapd.daemon.worker import Worker, whole_files
from swapd.device import Device, DeviceError, DeviceLost, NotAllBack
from swapd.shared import protocol
from swapd.shared.limits import Pool
from swapd.shared.protocol import Runs
from swapd.shared.units import size

log = logging.getLogger("swapd.daemon.lending")

#: First interval for asking again for memory that is not there yet; it doubles up to the last.
RETRY_FIRST_S = 0.05
RETRY_LAST_S = 1.0


class _Exchange(NamedTuple):
    """Memory that goes, and other memory that comes. Its generation belongs to no component and no
    other debt."""

    name: str
    generation: int
    runs: Runs
    then: Callable[[], None]


class Lender:
    """Lends chunks' memory and takes it back, one order at a time each."""

    def __init__(
        self,
        device: Device,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        post: Callable[[AnyEvent], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._device = device
        self._loop = loop
        self._clock = clock
        self._post = post
        self._crashed = crashed
        self._thread = Pool(1, "swapd-lend")
        self._closed = False
        self._last_ticket = 0
        #: Missing answers, by ticket; and the number of missing answers of each generation.
        self._tickets: dict[int, tuple[int, Lend | _Exchange]] = {}
        self._lacking: dict[int, int] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        #: Why requested memory is not back yet, by generation.
        self._overdue: dict[int, str] = {}
        self._exchanges = itertools.count(-1000, -1)

    def lend(self, order: Lend, workers: Mapping[int, Worker]) -> None:
        """Make every session let go, then give the memory to the driver."""
        self._collect(order, workers)

    def exchange(
        self, session: int, runs: Runs, workers: Mapping[int, Worker], then: Callable[[], None]
    ) -> None:
        """Put other memory in unused chunks, and call `then`.

        The old memory goes to the driver, which gives it to no process as long as work of the
        process of `session` may reach it. Meanwhile other memory may be short; then the daemon asks
        until there is some.
        """
        name = f"memory that session {session} could write to"
        self._collect(_Exchange(name, next(self._exchanges), runs, then), workers)

    def _collect(self, order: Lend | _Exchange, workers: Mapping[int, Worker]) -> None:
        files = whole_files(order.runs, self._device)
        drops: dict[int, protocol.Drop] = {}
        for session, worker in workers.items():
            if had := worker.forget_files(files):
                self._last_ticket += 1
                self._tickets[self._last_ticket] = session, order
                drops[session] = protocol.Drop(had, self._last_ticket)
        if not drops:
            return self._give(order)
        self._lacking[order.generation] = len(drops)
        self._post(Dropping(self._clock(), order.generation, tuple(drops)))
        told = [(workers[session], drop) for session, drop in drops.items()]
        for worker, drop in told:
            worker.lifeline.send(drop)

    def dropped(self, session: int, ticket: int) -> None:
        """A session says that it has let go."""
        if ticket in self._tickets and self._tickets[ticket][0] == session:
            order = self._tickets[ticket][1]
            self._post(Dropped(self._clock(), session, order.generation))
            self._settle(ticket)

    def session_gone(self, session: int) -> None:
        """The session cannot be asked any more. Mappings of its process go when that ends."""
        for ticket in [t for t, (s, _) in self._tickets.items() if s == session]:
            self._settle(ticket)

    def reclaim(self, order: Reclaim) -> None:
        """Take the memory back, as soon as the driver has it again."""
        then = lambda: self._post(Reclaimed(self._clock(), order.generation))  # noqa: E731
        self._take(order, then, RETRY_FIRST_S)

    def notes(self) -> tuple[str, ...]:
        """For `status`: which memory is not back yet, and why."""
        return tuple(self._overdue.values())

    async def finish(self) -> None:
        """Wait for the current work of the device; no more events are posted."""
        self._stop()
        await self._thread.finish()

    def close(self) -> None:
        """The same, blocking, until all orders are done."""
        self._stop()
        self._thread.shutdown()

    def _stop(self) -> None:
        self._closed = True
        for timer in self._timers:
            timer.cancel()

    def _settle(self, ticket: int) -> None:
        _, order = self._tickets.pop(ticket)
        self._lacking[order.generation] -= 1
        if not self._lacking[order.generation]:
            del self._lacking[order.generation]
            self._give(order)

    def _give(self, order: Lend | _Exchange) -> None:
        future = self._thread.submit(self._device.lend, order.runs)
        future.add_done_callback(lambda f: self._on_loop(self._lent, order, f))

    def _lent(self, order: Lend | _Exchange, future: "Future[None]") -> None:
        if self._closed:
            return
        error = future.exception()
        if isinstance(order, _Exchange) and (error is None or isinstance(error, DeviceLost)):
            self._take(order, order.then, RETRY_FIRST_S)
        elif isinstance(order, _Exchange) and isinstance(error, DeviceError):
            # part of the old memory is still there: no session may have it
            self._overdue[order.generation] = f"cannot exchange {order.name}: {error}"
            self._later(RETRY_LAST_S, self._give, order)
        elif isinstance(error, DeviceError) and isinstance(order, Lend):
            why = str(error)
            log.error("cannot lend %s: %s", order.name, why)
            then = lambda: self._post(  # noqa: E731
                CopyFailed(self._clock(), order.generation, why)
            )
            self._take(order, then, RETRY_FIRST_S)
        elif error is not None:
            self._crashed(error)
        else:
            self._post(Lent(self._clock(), order.generation))

    def _take(
        self, order: Lend | Reclaim | _Exchange, then: Callable[[], None], after_s: float
    ) -> None:
        """Allocate all chunks of the order in the arena, then call `then`."""
        future = self._thread.submit(self._device.reclaim, order.runs)
        future.add_done_callback(lambda f: self._on_loop(self._taken, order, then, after_s, f))

    def _taken(
        self,
        order: Lend | Reclaim | _Exchange,
        then: Callable[[], None],
        after_s: float,
        future: "Future[None]",
    ) -> None:
        if self._closed:
            return
        error = future.exception()
        self._overdue.pop(order.generation, None)
        if isinstance(error, DeviceLost):
            # it will not come back, and nothing will be loaded there
            self._post(DeviceDown(self._clock(), str(error)))
            then()
        elif isinstance(error, DeviceError):
            if isinstance(error, NotAllBack) and isinstance(order, Reclaim) and error.back:
                self._post(Reclaimed(self._clock(), order.generation, error.back))
                order, after_s = msgspec.structs.replace(order, runs=error.still), RETRY_FIRST_S
            longer = min(2 * after_s, RETRY_LAST_S)
            why = (
                f"{order.name}: {size(self._nbytes(order.runs))} are not back yet; swapd asks "
                f"again: {error}"
            )
            self._overdue[order.generation] = why
            if after_s < longer == RETRY_LAST_S:
                log.warning("%s", why)
            self._later(after_s, self._take, order, then, longer)
        elif error is not None:
            self._crashed(error)
        else:
            then()

    def _nbytes(self, runs: Runs) -> int:
        return sum(n for _, n in runs) * self._device.chunk_bytes

    def _on_loop(self, done: Callable[..., None], *args: object) -> None:
        self._loop.call_soon_threadsafe(done, *args)

    def _later(self, after_s: float, then: Callable[..., None], *args: object) -> None:
        def run() -> None:
            self._timers.discard(timer)
            then(*args)

        timer = self._loop.call_later(after_s, run)
        self._timers.add(timer)
