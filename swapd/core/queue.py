"""Who waits, in which order, and until when. Pure; decides nothing about memory."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush

from swapd.core.records import Key, Waiter


class WaitQueue:
    """Waiters by priority and arrival, their deadlines, and a bound on being overtaken."""

    def __init__(self, patience_s: float) -> None:
        #: A waiter that has waited longer than this goes first, whatever its priority.
        self._patience_s = patience_s
        #: Every waiter that was not granted, parked and admitted ones included.
        self._all: dict[Key, Waiter] = {}
        #: Those that wait for memory, sorted by `Waiter.order`.
        self._queued: list[Waiter] = []
        #: The same, by arrival.
        self._arrivals: dict[Key, Waiter] = {}
        self._deadlines: list[tuple[float, Key]] = []

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._all.values())

    def __contains__(self, key: Key) -> bool:
        return key in self._all

    def get(self, key: Key) -> Waiter | None:
        return self._all.get(key)

    @property
    def queued(self) -> list[Waiter]:
        """Those that wait for memory, in order. Not to be changed by the caller."""
        return self._queued

    def add(self, waiter: Waiter) -> None:
        """Know a waiter and its deadline; it is not queued yet."""
        self._all[waiter.key] = waiter
        if waiter.deadline is not None:
            heappush(self._deadlines, (waiter.deadline, waiter.key))

    def push(self, waiter: Waiter) -> None:
        """Queue a known waiter for memory."""
        insort(self._queued, waiter, key=lambda w: w.order)
        self._arrivals[waiter.key] = waiter

    def unqueue(self, waiter: Waiter) -> None:
        """It no longer waits for memory (admitted, parked or gone)."""
        if self._arrivals.pop(waiter.key, None) is None:
            return
        del self._queued[bisect_left(self._queued, waiter.order, key=lambda w: w.order)]

    def forget(self, waiter: Waiter) -> None:
        """Granted or refused: nothing is left of it."""
        self.unqueue(waiter)
        del self._all[waiter.key]

    def is_queued(self, waiter: Waiter) -> bool:
        return waiter.key in self._arrivals

    def head(self, now: float) -> Waiter | None:
        """Whose turn it is: the oldest if its patience is over, else the first in order."""
        if not self._queued:
            return None
        oldest = next(iter(self._arrivals.values()))
        return oldest if now - oldest.arrived >= self._patience_s else self._queued[0]

    def expired(self, now: float) -> list[Waiter]:
        """Remove and return nothing but the deadlines that have passed."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heappop(self._deadlines)
            if waiter := self._all.get(key):
                late.append(waiter)
        return late

    def next_deadline(self) -> float | None:
        """When `expired` or `head` may next answer differently by time alone."""
        while self._deadlines and self._deadlines[0][1] not in self._all:
            heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._queued:
            oldest = next(iter(self._arrivals.values()))
            if oldest is not self._queued[0]:
                times.append(oldest.arrived + self._patience_s)
        return min(times, default=None)
