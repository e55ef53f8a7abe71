"""Timed work of the daemon: it notifies a watchdog, and ends when no session needs it any more."""

import asyncio
import logging
from collections.abc import Callable

from swapd.shared.system import notify_systemd
from swapd.shared.units import seconds

log = logging.getLogger("swapd.daemon.timers")


#: Shortest time for which a daemon with `linger` waits for its first session.
FIRST_S = 10.0


class Watchdog:
    """Tells systemd that the loop runs, twice in the interval that systemd sets."""

    def __init__(self, loop: asyncio.AbstractEventLoop, waits_s: float | None) -> None:
        """`waits_s`: as `watchdog_s`; None: there is no watchdog."""
        self._loop = loop
        self._period_s = None if waits_s is None else waits_s / 2
        self._timer: asyncio.TimerHandle | None = None
        self._tell()

    def _tell(self) -> None:
        if self._period_s is not None:
            notify_systemd("WATCHDOG=1")
            self._timer = self._loop.call_later(self._period_s, self._tell)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Linger:
    """Calls `stop` when there has been no session for `linger_s` seconds; never if that is None."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, linger_s: float | None, stop: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._stop = stop
        self._linger_s = linger_s
        self._timer: asyncio.TimerHandle | None = None
        self._sessions = 0
        #: Whether there has been a session: the first client may take a while to connect.
        self._used = False
        self.count(0)

    def count(self, sessions: int) -> None:
        """Set the number of sessions."""
        self._sessions = sessions
        self._used = self._used or sessions > 0
        self.close()
        if not sessions and self._linger_s is not None:
            after_s = self._linger_s if self._used else max(self._linger_s, FIRST_S)
            self._timer = self._loop.call_later(after_s, self._over)

    def set(self, linger_s: float | None) -> None:
        """Set the time from now on."""
        self._linger_s = linger_s
        self.count(self._sessions)

    def _over(self) -> None:
        assert self._linger_s is not None
        log.info("stopping: no session for %s, as --linger says", seconds(self._linger_s))
        self._stop()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
