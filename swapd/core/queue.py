"""The waiters, their order and their deadlines. Pure; decides nothing about memory."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from swapd.core.orders import Deadlines
from swapd.core.records import Key, Waiter

_order = attrgetter("order")
_seq = attrgetter("seq")


class Parked:
    """Waiters for a name that is not registered, or not committed."""

    def __init__(self) -> None:
        self.waiters: dict[Key, Waiter] = {}
        #: The same by each name that they asked for: a component or a family.
        self.by_name: dict[str, dict[Key, Waiter]] = {}

    def add(self, w: Waiter) -> None:
        self.waiters[w.key] = w
        for name in w.asked:
            self.by_name.setdefault(name, {})[w.key] = w

    def drop(self, w: Waiter) -> None:
        """No-op if it is not parked."""
        if self.waiters.pop(w.key, None) is None:
            return
        for name in set(w.asked):
            del self.by_name[name][w.key]
            if not self.by_name[name]:
                del self.by_name[name]

    def awaiting(self, *names: str) -> list[Waiter]:
        """Those that asked for any of `names`, in order of arrival."""
        found = {key: w for name in names for key, w in self.by_name.get(name, {}).items()}
        return sorted(found.values(), key=_seq)


class WaitQueue:
    """Waiters by priority and arrival, their deadlines, and a bound on being overtaken."""

    def __init__(self, patience_s: float) -> None:
        #: A waiter that has waited longer than this goes first, at any priority.
        self.patience_s = patience_s
        #: Every waiter that was not granted, parked and admitted ones included.
        self._all: dict[Key, Waiter] = {}
        #: Those that wait for memory, sorted by `Waiter.order`.
        self._queued: list[Waiter] = []
        #: The same, sorted by arrival.
        self._arrivals: list[Waiter] = []
        #: Deadlines of all that have one.
        self._deadlines: Deadlines[Key] = Deadlines()

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
        """Add a waiter and its deadline; it is not queued yet."""
        self._all[waiter.key] = waiter
        if waiter.deadline is not None:
            self._deadlines.set(waiter.key, waiter.deadline)

    def push(self, waiter: Waiter) -> None:
        """Queue a known waiter for memory."""
        waiter.queued = True
        insort(self._queued, waiter, key=_order)
        insort(self._arrivals, waiter, key=_seq)

    def unqueue(self, waiter: Waiter) -> None:
        """The waiter no longer waits for memory (admitted, parked or gone)."""
        if waiter.queued:
            waiter.queued = False
            del self._queued[bisect_left(self._queued, waiter.order, key=_order)]
            del self._arrivals[bisect_left(self._arrivals, waiter.seq, key=_seq)]

    def forget(self, waiter: Waiter) -> None:
        """Remove a waiter that was granted or refused."""
        self.unqueue(waiter)
        del self._all[waiter.key]
        self._deadlines.drop(waiter.key)

    def head(self, now: float) -> Waiter | None:
        """Whose turn it is: the oldest if its patience is over, else the first in order."""
        if not self._queued:
            return None
        oldest = self._arrivals[0]
        return oldest if now >= oldest.arrived + self.patience_s else self._queued[0]

    def expired(self, now: float) -> list[Waiter]:
        """Those whose deadline has passed, earliest first."""
        return [self._all[key] for key in self._deadlines.over(now)]

    def next_deadline(self, since: float) -> float | None:
        """When `expired` or `head` first answers differently than `head` did at `since`."""
        first = self._deadlines.next()
        times = [] if first is None else [first]
        if self._queued:
            oldest = self._arrivals[0]
            impatient_at = oldest.arrived + self.patience_s
            if oldest is not self._queued[0] and impatient_at > since:
                times.append(impatient_at)
        return min(times, default=None)
