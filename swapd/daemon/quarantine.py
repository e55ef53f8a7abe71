"""Watches processes that may still write to device memory after the end of their session.

No other session gets that memory before. A process says itself that it has let go, or it ends, with
all its threads, as its pidfd tells.

On a GPU that is not enough. Work that a process has put there runs until the driver has torn its
channels down. The driver does so when the last descriptor of its device files is closed: mostly
before the process has ended; later if the driver delays it, or a child has them too. No call
reports this: NVML's list of processes lacks those of other pid namespaces. But the driver gives
memory to no process while another one still maps it or refers to it. So once the process has ended,
the daemon gives its chunks back to the driver, and asks for others in their place
(`lending.Lender.exchange`). Work that still runs writes to the old memory, which no process has
yet.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from swapd.core import Residency, events
from swapd.daemon.inbox import Inbox
from swapd.shared import fds
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import Runs
from swapd.shared.system import has_ended, is_alive, open_pidfd

log = logging.getLogger("swapd")

#: Interval for retrying to watch a process when no descriptor was free for it.
LOOK_AGAIN_S = 1.0
#: Interval for checking whether the last copy from the process's memory has ended.
COPIES_S = 0.05

#: exchange(session, runs, then): put other memory in these chunks, and call `then`.
Exchange = Callable[[int, Runs, Callable[[], None]], None]


@dataclass(slots=True)
class _Process:
    """A process whose session has ended."""

    session: int
    pid: int
    watch: "asyncio.Task[None] | None" = None
    ended: bool = False


class Quarantine:
    """All such processes, by the token of the session."""

    def __init__(self, core: Residency, inbox: Inbox, exchange: Exchange | None) -> None:
        """`exchange`: on a device whose work may outlast its process."""
        self._core = core
        self._inbox = inbox
        self._exchange = exchange
        self._processes: dict[bytes, _Process] = {}

    def __contains__(self, token: bytes) -> bool:
        return token in self._processes

    def add(self, token: bytes, session: int, pid: int) -> None:
        """Add a session that ends; its process, or the process's work on the device, may go on."""
        if self._exchange is not None or not has_ended(pid):
            self._processes[token] = _Process(session, pid)

    def is_ending(self, token: bytes) -> bool:
        """Whether its process is ending already, without being told."""
        return token in self._processes and not is_alive(self._processes[token].pid)

    def watch(self, token: bytes) -> None:
        """Watch a process whose session the core has ended."""
        if (process := self._processes.get(token)) is None:
            return  # it has let go by now
        if process.session in self._core.ledger.quarantined:
            process.watch = self._inbox.start(self._watch(token, process))
        else:
            del self._processes[token]

    def let_go(self, pid: int, token: bytes) -> None:
        """The process has unmapped the memory of its session; only the process itself may say
        so."""
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
        """Wait for the end of the process, and of its work on the device."""
        while not process.ended:
            await self._wait_for_end(process)
        ledger, session = self._core.ledger, process.session
        if self._exchange is None:
            self._exited(token)
            return
        while any(m.writer == session for m in ledger.moves.values()):  # noqa: ASYNC110 - rare
            await asyncio.sleep(COPIES_S)  # its chunks come when it ends
        runs = tuple(run for held in ledger.quarantined[session] for run in held)
        self._exchange(session, runs, lambda: self._exited(token))

    async def _wait_for_end(self, process: _Process) -> None:
        """Wait until it has ended, or for a moment if no descriptor is free to watch it."""
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
