"""Processes whose session has ended and that may still write to what it had, until they cannot.

Nobody else may have that memory before. A process says itself that it has let go, or it ends.
"""

import asyncio
import logging
from collections.abc import Callable

from swapd.core import Residency, events
from swapd.core.events import AnyEvent
from swapd.shared import fds
from swapd.shared.fds import OwnedFd
from swapd.shared.system import is_alive, open_pidfd

log = logging.getLogger("swapd")

#: How often a process is asked after that no descriptor was there to watch with.
LOOK_AGAIN_S = 1.0


class Left:
    """All of them, by the token of the session."""

    def __init__(
        self,
        core: Residency,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        post: Callable[[AnyEvent], None],
    ) -> None:
        self._core = core
        self._loop = loop
        self._clock = clock
        self._post = post
        #: The session and the process.
        self._left: dict[bytes, tuple[int, int]] = {}
        #: What says that the process has ended.
        self._watches: dict[bytes, OwnedFd] = {}

    def __contains__(self, token: bytes) -> bool:
        return token in self._left

    def add(self, token: bytes, session: int, pid: int) -> None:
        """A session ends, whose process may go on."""
        if is_alive(pid):
            self._left[token] = session, pid

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
        if token not in self._left or self._left[token][1] != pid:
            return
        if self._left[token][0] in self._core.ledger.sessions:
            self._loop.call_soon(self.let_go, pid, token)  # it ends in steps
        else:
            self._post(events.LetGo(self._clock(), self._forget(token)))

    def _exited(self, token: bytes) -> None:
        self._post(events.ProcessExited(self._clock(), self._forget(token)))

    def _forget(self, token: bytes) -> int:
        """The session it was the token of."""
        session, _ = self._left.pop(token)
        watch = self._watches.pop(token, None)
        if watch is not None:
            self._loop.remove_reader(watch.fileno())
            watch.close()
        return session
