"""Processes whose session has ended and that may still write to what it had, until they cannot.

Nobody else may have that memory before. A process says itself that it has let go, or it ends, with
all its threads, as its pidfd tells.

On a GPU that is not all. What a process has put there runs until the driver has torn its channels
down. It does so when the last descriptor of its device files is closed: mostly before the process
has ended; later if the driver puts it off, or a child has them too. No call says that it is done:
NVML's list of processes does not know those of other pid namespaces. But the driver gives memory to
nobody while anything of another process is mapped there, or refers to it. So once the process has
ended, its chunks are given back to the driver, and others are asked for in their place
(`lending.Lender.exchange`). What still runs writes to the old memory, which is nobody's yet.
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

#: How often a process is asked after that no descriptor was there to watch with.
LOOK_AGAIN_S = 1.0
#: How often it is looked whether the last copy from what a process had has ended.
COPIES_S = 0.05

#: exchange(session, runs, then): have other memory in these chunks, and call `then`.
Exchange = Callable[[int, Runs, Callable[[], None]], None]


class Left:
    """All of them, by the token of the session."""

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
        #: What says that the process has ended.
        self._watches: dict[bytes, OwnedFd] = {}
        #: Those that have ended, and whose chunks get other memory.
        self._ended: set[bytes] = set()

    def __contains__(self, token: bytes) -> bool:
        return token in self._left

    def add(self, token: bytes, session: int, pid: int) -> None:
        """A session ends, whose process may go on, or its work on the device."""
        if self._exchange is not None or not has_ended(pid):
            self._left[token] = session, pid

    def is_ending(self, token: bytes) -> bool:
        """Whether its process ends by itself: nobody need tell it to."""
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
        """The process has unmapped what its session had; nobody says so for another."""
        if token not in self._left or self._left[token][1] != pid or token in self._ended:
            return
        if self._left[token][0] in self._core.ledger.sessions:
            self._loop.call_soon(self.let_go, pid, token)  # it ends in steps
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
        """The session it was the token of."""
        self._unwatch(token)
        self._ended.discard(token)
        return self._left.pop(token)[0]

    def _unwatch(self, token: bytes) -> None:
        watch = self._watches.pop(token, None)
        if watch is not None:
            self._loop.remove_reader(watch.fileno())
            watch.close()
