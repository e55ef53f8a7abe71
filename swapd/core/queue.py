"""Waiters in order, with their deadlines; and ordered sets for other modules. Pure."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import takewhile
from operator import attrgetter
from typing import Generic, TypeVar

from swapd.core.records import Agent, Key, Waiter

#: Most waiters behind the head of the queue that one decision looks at.
LOOKED_AT = 16

_order = attrgetter("order")
_seq = attrgetter("seq")

Thing = TypeVar("Thing", str, int, tuple[int, int])

#: Ranks compare item by item. No two things in one set have the same rank.
Rank = tuple[float, ...]


class Ranked(Generic[Thing]):
    """Things sorted by rank. Every call takes at most logarithmic time."""

    def __init__(self) -> None:
        self._ranks: dict[Thing, Rank] = {}
        self._sorted: list[tuple[Rank, Thing]] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def __contains__(self, thing: Thing) -> bool:
        return thing in self._ranks

    def __iter__(self) -> Iterator[Thing]:
        """In order. Put and drop nothing meanwhile."""
        return (thing for _, thing in self._sorted)

    def __reversed__(self) -> Iterator[Thing]:
        return (thing for _, thing in reversed(self._sorted))

    def rank(self, thing: Thing) -> Rank:
        return self._ranks[thing]

    def last(self) -> Rank:
        return self._sorted[-1][0]

    def put(self, thing: Thing, rank: Rank) -> None:
        self.drop(thing)
        self._ranks[thing] = rank
        insort(self._sorted, (rank, thing))

    def drop(self, thing: Thing) -> None:
        rank = self._ranks.pop(thing, None)
        if rank is not None:
            del self._sorted[bisect_left(self._sorted, (rank, thing))]


class Deadlines(Ranked[Thing]):
    def set(self, thing: Thing, until: float) -> None:
        self.put(thing, (until,))

    def next(self) -> float | None:
        return self._sorted[0][0][0] if self._sorted else None

    def over(self, now: float) -> list[Thing]:
        if not self._sorted or self._sorted[0][0][0] > now:
            return []
        late = takewhile(lambda ranked: ranked[0][0] <= now, self._sorted)
        return [thing for _, thing in late]


class WaitQueue:
    """All waiters, with the order of those that wait for memory."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        #: Every waiter, also parked and admitted ones.
        self._all: dict[Key, Waiter] = {}
        #: Waiters for memory, sorted by `Waiter.order`. Callers must not change the list.
        self.queued: list[Waiter] = []
        #: The same, sorted by arrival.
        self._arrivals: list[Waiter] = []
        #: The same by agent; those that take old bytes; and those that `beside` has yet to handle.
        self._of_agents: dict[Agent, dict[Key, Waiter]] = {}
        self._taking_old: dict[Key, Waiter] = {}
        self._granted: list[Waiter] = []
        #: Queued waiters whose agent held a lease when they were queued.
        self.holding: dict[Agent, dict[Key, Waiter]] = {}
        #: Queued waiters whose Waiting action the planner records, unless it admits them.
        self.untold: dict[Key, Waiter] = {}
        #: Waiters for names that are not registered or committed, by each name that they asked for.
        self.parked: dict[str, dict[Key, Waiter]] = {}
        self._deadlines: Deadlines[Key] = Deadlines()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._all.values())

    def __contains__(self, key: Key) -> bool:
        return key in self._all

    def get(self, key: Key) -> Waiter | None:
        return self._all.get(key)

    def add(self, waiter: Waiter) -> None:
        self._all[waiter.key] = waiter
        if waiter.deadline is not None:
            self._deadlines.set(waiter.key, waiter.deadline)

    def push(self, waiter: Waiter) -> None:
        waiter.queued = True
        insort(self.queued, waiter, key=_order)
        insort(self._arrivals, waiter, key=_seq)
        self._of_agents.setdefault(waiter.owner, {})[waiter.key] = waiter
        if waiter.takes_old:
            self._taking_old[waiter.key] = waiter

    def take_old(self, waiter: Waiter) -> None:
        """Let a queued waiter take the old bytes of updated components that its session holds."""
        waiter.takes_old = True
        self._taking_old[waiter.key] = waiter

    def beside(self, waiter: Waiter) -> Iterator[Waiter]:
        """Yield the queued waiters of its agent, and those of its session that take old bytes. As a
        grant may lead to the next one thousands of times, a call during the iteration of another
        yields nothing, and leaves its waiter to that one."""
        self._granted.append(waiter)
        if len(self._granted) > 1:
            return
        for one in self._granted:  # grows meanwhile
            of_agent = self._of_agents.get(one.owner, {}).values()
            old = (other for other in self._taking_old.values() if other.session == one.session)
            yield from (other for other in [*of_agent, *old] if other.queued)
        self._granted.clear()

    def push_holding(self, waiter: Waiter) -> None:
        """Note that the agent of a queued waiter holds a lease, and may be in the way of others."""
        self.holding.setdefault(waiter.owner, {})[waiter.key] = waiter
        if not waiter.why:
            self.untold[waiter.key] = waiter

    def park(self, waiter: Waiter) -> None:
        waiter.parked = True
        for name in waiter.asked:
            self.parked.setdefault(name, {})[waiter.key] = waiter

    def awaiting(self, *names: str) -> list[Waiter]:
        found = {key: w for name in names for key, w in self.parked.get(name, {}).items()}
        return sorted(found.values(), key=_seq)

    def leave(self, waiter: Waiter) -> None:
        """End the wait for memory or names: the waiter is admitted, parked anew, or gone."""
        key = waiter.key
        if waiter.queued:
            waiter.queued = False
            del self.queued[bisect_left(self.queued, waiter.order, key=_order)]
            del self._arrivals[bisect_left(self._arrivals, waiter.seq, key=_seq)]
            self.untold.pop(key, None)
            self._taking_old.pop(key, None)
            _drop(self._of_agents, waiter.owner, key)
            _drop(self.holding, waiter.owner, key)
        elif waiter.parked:
            waiter.parked = False
            for name in waiter.asked:
                _drop(self.parked, name, key)

    def forget(self, waiter: Waiter) -> None:
        self.leave(waiter)
        del self._all[waiter.key]
        if waiter.deadline is not None:
            self._deadlines.drop(waiter.key)

    def head(self, now: float) -> Waiter | None:
        """Return the waiter whose turn it is: the oldest if its patience is over, else the first in
        order."""
        if not self.queued:
            return None
        oldest = self._arrivals[0]
        return oldest if now >= oldest.arrived + self.patience_s else self.queued[0]

    def admitted(self, waiter: Waiter, now: float) -> None:
        """Take a waiter out of the queue, and count it if it overtakes the head."""
        self.leave(waiter)
        if (head := self.head(now)) is None:
            return
        if head is self.queued[0]:
            head.overtaken += head.order < waiter.order
        else:
            head.overtaken += head.seq < waiter.seq

    def outranks(self, waiter: Waiter, head: Waiter) -> bool:
        """Return whether a waiter has a higher priority than the head, or the same and an earlier
        due time, while the head's patience is not over."""
        sooner = waiter.priority == head.priority and waiter.due < head.due
        return (waiter.priority > head.priority or sooner) and head is self.queued[0]

    def expired(self, now: float) -> list[Waiter]:
        return [self._all[key] for key in self._deadlines.over(now)]

    def next_deadline(self, since: float) -> float | None:
        """Return when `expired`, or `head` compared with `since`, may first change."""
        first = self._deadlines.next()
        times = [] if first is None else [first]
        if self.queued:
            oldest = self._arrivals[0]
            impatient_at = oldest.arrived + self.patience_s
            if oldest is not self.queued[0] and impatient_at > since:
                times.append(impatient_at)
        return min(times, default=None)


Of = TypeVar("Of")


def _drop(waiters: dict[Of, dict[Key, Waiter]], of: Of, key: Key) -> None:
    if some := waiters.get(of):
        some.pop(key, None)
        if not some:
            del waiters[of]
