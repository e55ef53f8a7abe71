"""Reports the progress of pinning, in the swap log and to people: a few lines for any number of
host copies."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from swapd.core.events import AnyEvent, HostCopiesPinned
from swapd.device.base import Pinned
from swapd.shared.units import seconds, size

log = logging.getLogger("swapd.daemon.pinning")

#: Interval for checking whether all are pinned.
LOOK_S = 1.0
#: Shortest time between two reports.
PERIOD_S = 10.0


class Pins(Protocol):
    """The numbers to report; see `Masters`."""

    to_pin_bytes: int
    pinning: int

    def pinned(self) -> Pinned | None: ...


class Pinning:
    """Posts `HostCopiesPinned` while host copies are pinned, and once they are."""

    def __init__(
        self,
        pins: Pins,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        post: Callable[[AnyEvent], None],
    ) -> None:
        self._pins = pins
        self._loop = loop
        self._clock = clock
        self._post = post
        self._timer: asyncio.TimerHandle | None = None
        #: When the current pinning began, and how long it has taken, or took.
        self._begun = 0.0
        self._took_s = 0.0
        self._ended = True
        #: Time and numbers of the last report.
        self._told_at = float("-inf")
        self._told: tuple[int, int, str] = (0, 0, "")

    def begun(self) -> None:
        """The daemon has mapped a host copy, and pins it now, if the device pins any."""
        if self._timer is None and self._pins.pinned() is not None:
            self._begun = self._clock()
            self._ended = False
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Stop reporting."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now, ends = self._clock(), not self._pins.pinning  # first: others may be pinned meanwhile
        found, of = self._pins.pinned(), self._pins.to_pin_bytes
        assert found is not None
        if not (ends and self._ended):
            self._took_s = now - self._begun
        self._ended = ends
        told = found.nbytes, of, found.refused
        if ends and not of:  # all of them are gone again
            self._told = told
        due = now - self._told_at >= PERIOD_S and (ends or self._took_s >= PERIOD_S)
        if due and told != self._told:
            self._told, self._told_at = told, now
            self._say(found, of)
        settled = ends and told == self._told
        self._timer = None if settled else self._loop.call_later(LOOK_S, self._look)

    def _say(self, found: Pinned, of: int) -> None:
        told = HostCopiesPinned(self._told_at, found.nbytes, of, self._took_s, found.refused)
        self._post(told)
        if self._took_s >= 2 * LOOK_S:  # else no person has noticed it
            so_far = "" if self._ended else " so far"
            log.info(
                "%s of %s of host copies are pinned%s, after %s",
                size(found.nbytes),
                size(of),
                so_far,
                seconds(self._took_s),
            )
