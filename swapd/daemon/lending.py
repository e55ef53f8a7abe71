"""Device memory in workers' hands: files sent to sessions, loans, and memory that dead workers may
still write to."""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from swapd.core import Residency, events
from swapd.core.actions import Lend, Reclaim
from swapd.core.chunks import count
from swapd.core.events import CopyFailed, DeviceDown, DropAck, Dropping, Lent, Reclaimed
from swapd.daemon.dispatch import Inbox
from swapd.daemon.lifeline import Lifeline
from swapd.daemon.peers import Peer
from swapd.device import ChunksMissing, Device, DeviceError, DeviceLost
from swapd.device.base import files_of, whole_files
from swapd.shared import fds, protocol
from swapd.shared.board import Boards
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Runs
from swapd.shared.system import Threads, has_ended, is_alive, open_pidfd
from swapd.shared.units import size

log = logging.getLogger("swapd.daemon.lending")

#: First and longest interval for asking for memory that is not back yet; it doubles in between.
RETRY_FIRST_S = 0.05
RETRY_LAST_S = 1.0
#: Pause before watching a process again, for want of a descriptor.
LOOK_AGAIN_S = 1.0
#: Interval for checking whether copies of an ended session's chunks have ended.
COPIES_S = 0.05

#: Most files in one Drop: more do not fit into a packet of the lifeline.
DROPPED_MAX = 8192
#: Files in one packet; all are open for a moment.
FILES_MAX = 16
#: Descriptors that no new session takes: existing ones may use more threads.
SPARE_FOR_PEERS = 4

#: The names of a request with more than these are counted by their characters, too.
FEW_NAMES = 16

#: Done when a session has let go of files.
LetGo = asyncio.Future[None]


class WorkerConnection:
    """One session: its lifeline, its board, its open requests, and the files sent to it."""

    def __init__(self, lifeline: Lifeline, device: Device) -> None:
        """Raises: OSError without a descriptor for the board."""
        self.lifeline = lifeline
        self.boards = Boards()
        fds.keep(self.boards.fd, SPARE_FOR_PEERS)
        #: The peer that waits for each reply.
        self.unanswered: dict[int, Peer] = {}
        #: Characters of the names in each open request with many, and in all of these.
        self._names: dict[int, int] = {}
        self.names_chars = 0
        self._device = device
        #: (file, writable) of each file that the worker has.
        self._files: set[tuple[int, bool]] = set()

    def opens(self, request: protocol.AnyRequest, peer: Peer) -> None:
        self.unanswered[request.id] = peer
        if len(names := getattr(request, "names", ())) > FEW_NAMES:
            chars = self._names[request.id] = sum(map(len, names))
            self.names_chars += chars

    def answers(self, request: int) -> Peer | None:
        """End a request. Return the peer that waits for its answer, or None."""
        if self._names:
            self.names_chars -= self._names.pop(request, 0)
        return self.unanswered.pop(request, None)

    def welcome(self, rpc: str, *, strict: bool) -> None:
        device = self._device
        message = protocol.Welcome(
            version=protocol.VERSION,
            session=self.lifeline.session,
            token=self.lifeline.token,
            rpc=rpc,
            device=device.name,
            chunk_bytes=device.chunk_bytes,
            chunks=device.chunks,
            strict=strict,
            chunks_per_file=device.chunks_per_file,
            uuid=device.uuid,
        )
        self.lifeline.send(message, export=lambda: [OwnedFd(os.dup(self.boards.fd.fileno()))])

    def send_files(self, runs: Runs, *, writable: bool) -> None:
        """Send the descriptors that the worker lacks to map `runs`."""
        files = files_of(runs, self._device.chunks_per_file)
        missing = [n for n in files if (n, writable) not in self._files]
        for at in range(0, len(missing), FILES_MAX):
            some = tuple(missing[at : at + FILES_MAX])
            export = partial(self._export, some, writable=writable)
            self.lifeline.send(protocol.Files(some, writable), export=export)
            self._files.update((n, writable) for n in some)

    def _export(self, files: Iterable[int], *, writable: bool) -> list[OwnedFd]:
        """Raises: OSError while there are no descriptors; DeviceError."""
        exported: list[OwnedFd] = []
        try:
            exported.extend(self._device.export(file, writable=writable) for file in files)
        except BaseException:
            for fd in exported:
                fd.close()
            raise
        return exported

    def forget_files(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Forget files that the worker must let go of, and return those that it had. The next grant
        sends them again."""
        gone = set(numbers)
        had = {key for key in self._files if key[0] in gone}
        self._files -= had
        return tuple(sorted({n for n, _ in had}))


class Lender:
    """Lends the memory of chunks and takes it back.

    Memory is free once nothing refers to it, so every session must let go before the driver gets
    it. `Dropping` and `DropAck` name the sessions that were told and that have let go; the core
    limits the wait. Each `lend` and `reclaim` ends with one event: `reclaim` perhaps only when the
    worker's allocator gives the memory back.
    """

    def __init__(
        self, device: Device, connections: Mapping[int, WorkerConnection], inbox: Inbox
    ) -> None:
        """Raises: LimitError."""
        self._device = device
        self._connections = connections
        self._inbox = inbox
        self._thread = Threads(1, "swapd-lend")
        self._last_ticket = 0
        #: (session, generation, future) of each missing answer, by ticket.
        self._missing: dict[int, tuple[int, int, LetGo]] = {}
        #: Why requested memory is not back yet, by generation.
        self._overdue: dict[int, str] = {}
        #: Generations of exchanges, which belong to no component.
        self._exchanges = itertools.count(-1000, -1)

    def lend(self, order: Lend) -> None:
        self._inbox.start(self._lend(order, self._told_to_drop(order.generation, order.runs)))

    def reclaim(self, order: Reclaim) -> None:
        self._inbox.start(self._reclaim(order))

    def exchange(self, session: int, runs: Runs, then: Callable[[], None]) -> None:
        """Put other memory in unused chunks, then call `then`; ask again while there is none. The
        driver gives the old memory to no process while work of the process of `session` may reach
        it."""
        generation = next(self._exchanges)
        name = f"memory that session {session} could write to"
        let_go = self._told_to_drop(generation, runs)
        self._inbox.start(self._exchange(Reclaim(name, generation, runs), let_go, then))

    def dropped(self, session: int, ticket: int) -> None:
        if ticket in self._missing and self._missing[ticket][0] == session:
            _, generation, let_go = self._missing.pop(ticket)
            if all(left[:2] != (session, generation) for left in self._missing.values()):
                self._inbox.post(DropAck(self._inbox.clock(), session, generation))
            let_go.set_result(None)

    def session_gone(self, session: int) -> None:
        """Wait for the session no longer. Mappings of its process go when the process ends."""
        for ticket in [t for t, (s, *_) in self._missing.items() if s == session]:
            self._missing.pop(ticket)[2].set_result(None)

    def notes(self) -> tuple[str, ...]:
        return tuple(self._overdue.values())

    def _told_to_drop(self, generation: int, runs: Runs) -> list[LetGo]:
        files = whole_files(runs, self._device.chunks_per_file)
        drops: list[tuple[WorkerConnection, protocol.Drop]] = []
        told: dict[int, None] = {}
        letting_go: list[LetGo] = []
        for session, connection in self._connections.items():
            had = connection.forget_files(files)
            for at in range(0, len(had), DROPPED_MAX):
                self._last_ticket += 1
                told[session] = None
                letting_go.append(let_go := self._inbox.loop.create_future())
                self._missing[self._last_ticket] = session, generation, let_go
                drop = protocol.Drop(had[at : at + DROPPED_MAX], self._last_ticket)
                drops.append((connection, drop))
        if drops:
            self._inbox.post(Dropping(self._inbox.clock(), generation, tuple(told)))
        for connection, drop in drops:
            connection.lifeline.send(drop)
        return letting_go

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
        """Give the memory to the driver; return False, after a pause, if part of it stays in the
        arena, where no session may have it."""
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
        """Allocate the chunks again once the driver has their memory. `some(runs)`: chunks that are
        back before the others."""
        runs, after_s, generation = order.runs, RETRY_FIRST_S, order.generation
        while (error := await self._taken(runs)) is not None:
            if some is not None and isinstance(error, ChunksMissing) and error.back:
                some(error.back)
                runs, after_s = error.still, RETRY_FIRST_S
            longer = min(2 * after_s, RETRY_LAST_S)
            self._overdue[generation] = why = (
                f"{order.name}: {size(count(runs) * self._device.chunk_bytes)} are not back yet; "
                f"swapd asks again: {error}"
            )
            if after_s < longer == RETRY_LAST_S:
                log.warning("%s", why)
            await asyncio.sleep(after_s)
            after_s = longer
        self._overdue.pop(generation, None)

    async def _taken(self, runs: Runs) -> DeviceError | None:
        """Ask for the memory; return why some is missing."""
        try:
            await self._thread.run(self._device.reclaim, runs)
        except DeviceLost as exc:
            # the memory will not come back, and nothing will be loaded there
            self._inbox.post(DeviceDown(self._inbox.clock(), str(exc)))
        except DeviceError as exc:
            return exc
        return None


@dataclass(slots=True)
class _Process:
    """A process whose session has ended."""

    session: int
    pid: int
    watch: "asyncio.Task[None] | None" = None
    ended: bool = False


class Quarantine:
    """Processes that may still write to device memory after their session. No other session gets
    that memory until the process says that it has let go, or ends with all its threads, as its
    pidfd tells.

    On a GPU that is not enough. Work of the process runs until the driver has torn down its
    channels, once the last descriptor of its device files is closed: after the end of the process,
    if the driver is slow or a child has them too. No call reports this; NVML lists no processes of
    other pid namespaces. But the driver gives memory to no process while another maps it or refers
    to it. So after the end of the process the daemon gives its chunks to the driver and asks for
    others: work that still runs writes to memory that no process has.
    """

    def __init__(self, core: Residency, inbox: Inbox, lender: Lender, *, outlasts: bool) -> None:
        """`outlasts`: work on the device may go on after its process."""
        self._core = core
        self._inbox = inbox
        self._lender = lender
        self._outlasts = outlasts
        #: By session token.
        self._processes: dict[bytes, _Process] = {}

    def __contains__(self, token: bytes) -> bool:
        return token in self._processes

    def add(self, token: bytes, session: int, pid: int) -> None:
        if self._outlasts or not has_ended(pid):
            self._processes[token] = _Process(session, pid)

    def is_ending(self, token: bytes) -> bool:
        """Return whether its process is already ending by itself."""
        return token in self._processes and not is_alive(self._processes[token].pid)

    def watch(self, token: bytes) -> None:
        if (process := self._processes.get(token)) is None:
            return  # it has let go already
        if process.session in self._core.ledger.quarantined:
            process.watch = self._inbox.start(self._watch(token, process))
        else:
            del self._processes[token]

    def let_go(self, pid: int, token: bytes) -> None:
        """A process has unmapped its session's memory, as only itself may say."""
        process = self._processes.get(token)
        if process is None or process.pid != pid or process.ended:
            return
        if process.session in self._core.ledger.sessions:
            self._inbox.loop.call_soon(self.let_go, pid, token)  # its session ends in steps
            return
        if process.watch is not None:
            process.watch.cancel()
        del self._processes[token]
        self._inbox.post(events.UnmapAck(self._inbox.clock(), process.session))

    async def _watch(self, token: bytes, process: _Process) -> None:
        while not process.ended:
            await self._wait_for_end(process)
        ledger, session = self._core.ledger, process.session
        if not self._outlasts:
            self._exited(token)
            return
        while any(m.writer == session for m in ledger.moves.values()):  # noqa: ASYNC110 - rare
            await asyncio.sleep(COPIES_S)  # its chunks come when it ends
        runs = tuple(run for held in ledger.quarantined[session] for run in held)
        self._lender.exchange(session, runs, lambda: self._exited(token))

    async def _wait_for_end(self, process: _Process) -> None:
        """Wait until the process has ended, or for LOOK_AGAIN_S if no descriptor is free to watch
        it."""
        try:
            watch = open_pidfd(process.pid)
            watch = None if watch is None else fds.keep(watch)
        except OSError as exc:
            pid = process.pid
            log.warning("cannot watch process %d (%s); again in %g s", pid, exc, LOOK_AGAIN_S)
            await asyncio.sleep(LOOK_AGAIN_S)
            return
        if watch is not None:
            await self._readable(watch)
        process.ended = True

    async def _readable(self, watch: OwnedFd) -> None:
        ended = asyncio.Event()
        self._inbox.loop.add_reader(watch.fileno(), ended.set)
        try:
            await ended.wait()
        finally:
            self._inbox.loop.remove_reader(watch.fileno())
            watch.close()

    def _exited(self, token: bytes) -> None:
        session = self._processes.pop(token).session
        self._inbox.post(events.ProcessExited(self._inbox.clock(), session))
