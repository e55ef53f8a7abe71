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

from swapd.core import Residency, events
from swapd.core.events import AnyEvent
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


class Left:
    """All such processes, by the token of the session."""

    def __init__(
        self,
        core: Residency,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        post: Callable[[AnyEvent], None],
        exchange: Exchange | None,
    ) -> None:
        """`exchange`: on a device whose work may outlast its process."""
        self._core = core
        self._loop = loop
        self._clock = clock
        self._post = post
        self._exchange = exchange
        #: The session and the process.
        self._left: dict[bytes, tuple[int, int]] = {}
        #: Descriptors that tell when the process has ended.
        self._watches: dict[bytes, OwnedFd] = {}
        #: Sessions whose process has ended, and whose chunks get other memory.
        self._ended: set[bytes] = set()

    def __contains__(self, token: bytes) -> bool:
        return token in self._left

    def add(self, token: bytes, session: int, pid: int) -> None:
        """Add a session that ends; its process, or the process's work on the device, may go on."""
        if self._exchange is not None or not has_ended(pid):
            self._left[token] = session, pid

    def is_ending(self, token: bytes) -> bool:
        """Whether its process is ending already, without being told."""
        return token in self._left and not is_alive(self._left[token][1])

    def watch(self, token: bytes) -> None:
        """Watch a process whose session the core has ended."""
        if token not in self._left:
            return  # it has let go by now
        session, pid = self._left[token]
        if session not in self._core.ledger.quarantined:
            del self._left[token]
            return
        try:
            watch = open_pidfd(pid)
            watch = None if watch is None else fds.keep(watch)
        except OSError as exc:
            log.warning("cannot watch process %d (%s); again in %g s", pid, exc, LOOK_AGAIN_S)
            self._loop.call_later(LOOK_AGAIN_S, self.watch, token)
            return
        if watch is None:
            self._exited(token)
        else:
            self._watches[token] = watch
            self._loop.add_reader(watch.fileno(), self._exited, token)

    def let_go(self, pid: int, token: bytes) -> None:
        """The process has unmapped the memory of its session; only the process itself may say
        so."""
        if token not in self._left or self._left[token][1] != pid or token in self._ended:
            return
        if self._left[token][0] in self._core.ledger.sessions:
            self._loop.call_soon(self.let_go, pid, token)  # its session ends in steps
        else:
            self._post(events.LetGo(self._clock(), self._forget(token)))

    def _exited(self, token: bytes) -> None:
        self._unwatch(token)
        if self._exchange is None:
            return self._gone(token)
        self._ended.add(token)
        session, _ = self._left[token]
        ledger = self._core.ledger
        if any(move.writer == session for move in ledger.moves.values()):
            self._loop.call_later(COPIES_S, self._exited, token)  # its chunks come when it ends
            return
        runs = tuple(run for held in ledger.quarantined[session] for run in held)
        self._exchange(session, runs, lambda: self._gone(token))

    def _gone(self, token: bytes) -> None:
        self._post(events.ProcessExited(self._clock(), self._forget(token)))

    def _forget(self, token: bytes) -> int:
        """Forget it; return the session of the token."""
        self._unwatch(token)
        self._ended.discard(token)
        return self._left.pop(token)[0]

    def _unwatch(self, token: bytes) -> None:
        watch = self._watches.pop(token, None)
        if watch is not None:
            self._loop.remove_reader(watch.fileno())
            watch.close()
