"""Whose turn it is to start: one process at a time measures what the device has free.

An engine sizes its caches by what is free before it loads and after its first pass. While another
loads, or has memory lent to load in, that says nothing. Pure; actions are `handlers/starting.py`'s.
"""

from collections.abc import Iterator

from swapd.core.orders import Deadlines
from swapd.core.records import Key


class Starts:
    """All who start, in order of arrival: the first has the turn."""

    def __init__(self) -> None:
        #: Since when each is here.
        self._since: dict[Key, float] = {}
        self._until: Deadlines[Key] = Deadlines()

    def __iter__(self) -> Iterator[Key]:
        return iter(self._since)

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, key: Key) -> bool:
        return key in self._since

    @property
    def turn(self) -> Key | None:
        return next(iter(self._since), None)

    def come(self, key: Key, now: float, until: float | None) -> None:
        self._since[key] = now
        if until is not None and self.turn != key:
            self._until.set(key, until)

    def go(self, key: Key) -> None:
        """It has started, or gives up."""
        del self._since[key]
        self._until.drop(key)

    def has_turn(self, key: Key) -> float:
        """It waits no more; since when it did."""
        self._until.drop(key)
        return self._since[key]

    def of(self, session: int) -> list[Key]:
        return [key for key in self._since if key[0] == session]

    def next_deadline(self) -> float | None:
        return self._until.next()

    def late(self, now: float) -> list[Key]:
        return self._until.over(now)
