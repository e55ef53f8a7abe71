"""Lends device memory to a worker's own allocator, and takes it back; or exchanges it for other
memory.

Before the driver can have it, every session must let go of it: memory is free at the last
reference. The events `Dropping` and `DropAck` say which sessions were told, and which have let go;
the core decides how long to wait for one. Decides nothing. `lend` comes back as exactly one event
that ends it. So does `reclaim`, though it may take as long as the worker's allocator keeps the
memory.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping

from swapd.core.actions import Lend, Reclaim
from swapd.core.events import CopyFailed, DeviceDown, DropAck, Dropping, Lent, Reclaimed
from swapd.daemon.inbox import Inbox
from swapd.daemon.sessions import WorkerConnection
from swapd.device import Device, DeviceError, DeviceLost, NotAllBack
from swapd.device.pieces import whole_files
from swapd.shared import protocol
from swapd.shared.limits import Threads
from swapd.shared.protocol import Runs
from swapd.shared.units import size

log = logging.getLogger("swapd.daemon.lending")

#: First interval for asking again for memory that is not there yet; it doubles up to the last.
RETRY_FIRST_S = 0.05
RETRY_LAST_S = 1.0

#: When a session has let go of files.
LetGo = asyncio.Future[None]


class Lender:
    """Lends chunks' memory and takes it back, one order at a time each."""

    def __init__(
        self, device: Device, connections: Mapping[int, WorkerConnection], inbox: Inbox
    ) -> None:
        """Raises: LimitError."""
        self._device = device
        self._connections = connections
        self._inbox = inbox
        self._thread = Threads(1, "swapd-lend")
        self._last_ticket = 0
        #: Missing answers, by ticket: the session, the order's generation.
        self._missing: dict[int, tuple[int, int, LetGo]] = {}
        #: Why requested memory is not back yet, by generation.
        self._overdue: dict[int, str] = {}
        #: Generations of exchanges, which belong to no component.
        self._exchanges = itertools.count(-1000, -1)

    def lend(self, order: Lend) -> None:
        """Make every session let go, then give the memory to the driver."""
        self._inbox.start(self._lend(order, self._told_to_drop(order.generation, order.runs)))

    def reclaim(self, order: Reclaim) -> None:
        """Take the memory back, as soon as the driver has it again."""
        self._inbox.start(self._reclaim(order))

    def exchange(self, session: int, runs: Runs, then: Callable[[], None]) -> None:
        """Put other memory in unused chunks, and call `then`.

        The old memory goes to the driver, which gives it to no process as long as work of the
        process of `session` may reach it. Meanwhile other memory may be short; then the daemon asks
        until there is some.
        """
        generation = next(self._exchanges)
        name = f"memory that session {session} could write to"
        let_go = self._told_to_drop(generation, runs)
        self._inbox.start(self._exchange(Reclaim(name, generation, runs), let_go, then))

    def dropped(self, session: int, ticket: int) -> None:
        """A session says that it has let go."""
        if ticket in self._missing and self._missing[ticket][0] == session:
            _, generation, let_go = self._missing.pop(ticket)
            self._inbox.post(DropAck(self._inbox.clock(), session, generation))
            let_go.set_result(None)

    def session_gone(self, session: int) -> None:
        """The session cannot be asked any more. Mappings of its process go when that ends."""
        for ticket in [t for t, (s, *_) in self._missing.items() if s == session]:
            self._missing.pop(ticket)[2].set_result(None)

    def notes(self) -> tuple[str, ...]:
        """For `status`: which memory is not back yet, and why."""
        return tuple(self._overdue.values())

    async def finish(self) -> None:
        """Wait for the current work of the device, after `Inbox.stop`."""
        await self._thread.finish()

    def close(self) -> None:
        """End the thread. Blocks."""
        self._thread.shutdown()

    def _told_to_drop(self, generation: int, runs: Runs) -> list[LetGo]:
        """Tell the sessions that have files of these chunks to drop them."""
        files = whole_files(runs, self._device.chunks_per_file)
        drops: list[tuple[WorkerConnection, protocol.Drop]] = []
        told: dict[int, LetGo] = {}
        for session, connection in self._connections.items():
            if had := connection.forget_files(files):
                self._last_ticket += 1
                told[session] = let_go = self._inbox.loop.create_future()
                self._missing[self._last_ticket] = session, generation, let_go
                drops.append((connection, protocol.Drop(had, self._last_ticket)))
        if drops:
            self._inbox.post(Dropping(self._inbox.clock(), generation, tuple(told)))
        for connection, drop in drops:
            connection.lifeline.send(drop)
        return list(told.values())

    async def _lend(self, order: Lend, let_go: list[LetGo]) -> None:
        await asyncio.gather(*let_go)
        try:
            await self._thread.run(self._device.lend, order.runs)
        except DeviceError as exc:
            log.error("cannot lend %s: %s", order.name, exc)
            await self._take(Reclaim(order.name, order.generation, order.runs))
            self._inbox.post(CopyFailed(self._inbox.clock(), order.generation, str(exc)))
        else:
            self._inbox.post(Lent(self._inbox.clock(), order.generation))

    async def _reclaim(self, order: Reclaim) -> None:
        def back(runs: Runs) -> None:
            self._inbox.post(Reclaimed(self._inbox.clock(), order.generation, runs))

        await self._take(order, back)
        back(())

    async def _exchange(
        self, order: Reclaim, let_go: list[LetGo], then: Callable[[], None]
    ) -> None:
        await asyncio.gather(*let_go)
        while not await self._is_given(order):
            pass
        await self._take(order)
        then()

    async def _is_given(self, order: Reclaim) -> bool:
        """Give the memory to the driver; False, after a while, if part of it is still there: no
        session may have that."""
        try:
            await self._thread.run(self._device.lend, order.runs)
        except DeviceLost:
            return True
        except DeviceError as exc:
            self._overdue[order.generation] = f"cannot exchange {order.name}: {exc}"
            await asyncio.sleep(RETRY_LAST_S)
            return False
        return True

    async def _take(self, order: Reclaim, some: Callable[[Runs], None] | None = None) -> None:
        """Allocate the chunks in the arena again, when the driver has their memory. `some(runs)`:
        these are back before the others."""
        runs, after_s, generation = order.runs, RETRY_FIRST_S, order.generation
        try:
            while (error := await self._taken(runs)) is not None:
                if some is not None and isinstance(error, NotAllBack) and error.back:
                    some(error.back)
                    runs, after_s = error.still, RETRY_FIRST_S
                longer = min(2 * after_s, RETRY_LAST_S)
                self._overdue[generation] = why = (
                    f"{order.name}: {size(self._nbytes(runs))} are not back yet; swapd asks again: "
                    f"{error}"
                )
                if after_s < longer == RETRY_LAST_S:
                    log.warning("%s", why)
                await asyncio.sleep(after_s)
                after_s = longer
        finally:
            self._overdue.pop(generation, None)

    async def _taken(self, runs: Runs) -> DeviceError | None:
        """Ask for the memory; return why it is not all there yet."""
        try:
            await self._thread.run(self._device.reclaim, runs)
        except DeviceLost as exc:
            # it will not come back, and nothing will be loaded there
            self._inbox.post(DeviceDown(self._inbox.clock(), str(exc)))
        except DeviceError as exc:
            return exc
        return None

    def _nbytes(self, runs: Runs) -> int:
        return sum(n for _, n in runs) * self._device.chunk_bytes
