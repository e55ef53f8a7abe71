"""The turn to start: one process at a time measures the free memory of the device.

An engine sizes its caches by the memory that is free before it loads and after its first pass.
While another one loads, or borrows memory to load in, that measurement means nothing. Pure;
`handlers/starting.py` has the actions.
"""

from collections.abc import Iterator

from swapd.core.orders import Deadlines
from swapd.core.records import Key


class Starts:
    """All sessions that start, in order of arrival: the first has the turn."""

    def __init__(self) -> None:
        #: When each arrived.
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
        """The session has started, or gives up."""
        del self._since[key]
        self._until.drop(key)

    def has_turn(self, key: Key) -> float:
        """The turn is its own: it waits no more. Returns when it arrived."""
        self._until.drop(key)
        return self._since[key]

    def of(self, session: int) -> list[Key]:
        return [key for key in self._since if key[0] == session]

    def next_deadline(self) -> float | None:
        return self._until.next()

    def late(self, now: float) -> list[Key]:
        return self._until.over(now)
