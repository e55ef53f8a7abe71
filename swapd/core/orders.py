"""Orders that are kept up to date, not computed at each event. Pure; chooses nothing.

`Ranked` is a set of things in order of a rank; `Deadlines` are things in order of time.
`EvictionOrder` has the idle components in the order in which they should go: that of
`policy.eviction_order`, updated as each comes and goes.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Generic, TypeVar

from swapd.core.records import Component

Thing = TypeVar("Thing", str, int, tuple[int, int])

#: Ranks compare item by item; no two things of one order have the same rank.
Rank = tuple[float, ...]


class Ranked(Generic[Thing]):
    """Things by rank. Looking up, putting or dropping one takes time logarithmic in their
    number."""

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

    def rank(self, thing: Thing) -> Rank:
        return self._ranks[thing]

    def ranked(self) -> Iterator[tuple[Rank, Thing]]:
        """The same, each with its rank."""
        return iter(self._sorted)

    def put(self, thing: Thing, rank: Rank) -> None:
        """Give it this rank, instead of the one it had."""
        self.drop(thing)
        self._ranks[thing] = rank
        insort(self._sorted, (rank, thing))

    def drop(self, thing: Thing) -> None:
        """Forget it, if it is there."""
        rank = self._ranks.pop(thing, None)
        if rank is not None:
            del self._sorted[bisect_left(self._sorted, (rank, thing))]


class Deadlines(Ranked[Thing]):
    """Things by deadline. Every event asks for `next` and `over`."""

    def set(self, thing: Thing, until: float) -> None:
        """Set its deadline, instead of the one it had."""
        self.put(thing, (until,))

    def next(self) -> float | None:
        """The first deadline; None if there is none."""
        return self._sorted[0][0][0] if self._sorted else None

    def over(self, now: float) -> list[Thing]:
        """Things whose deadline has passed, earliest first."""
        if not self._sorted or self._sorted[0][0][0] > now:
            return []
        late = takewhile(lambda ranked: ranked[0][0] <= now, self._sorted)
        return [thing for _, thing in late]


#: The order of eviction: scratch that costs no copy, unused components, families in use.
_FOR_NOTHING, _IDLE, _USED = range(3)


class EvictionOrder:
    """Idle components in the order in which they should go.

    First the `sequential` ones, which were loaded ahead and not used; then scratch that is dropped
    without a copy; then the others. A component without a family has a place of its own. The idle
    parts of a family share one place: that of the most recently used part, or behind all unused
    components while a part is leased.
    """

    def __init__(self) -> None:
        self._stamp = 0
        #: All of them, each with a number that counts arrivals.
        self._all: dict[str, tuple[int, Component]] = {}
        #: The last arrival goes first.
        self._in_vain: OrderedDict[str, Component] = OrderedDict()
        #: Components without a family, and families.
        self._places: Ranked[str] = Ranked()
        #: The idle parts of each family, in order of arrival.
        self._parts: dict[str, OrderedDict[str, Component]] = {}
        #: How many parts of each family are leased.
        self._used: dict[str, int] = {}
        #: Chunks of all idle components.
        self.chunks = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def __iter__(self) -> Iterator[Component]:
        """In the order in which they should go. Change nothing meanwhile."""
        yield from reversed(self._in_vain.values())
        for name in self._places:
            yield from self._at(name)

    def among(self, names: Iterable[str]) -> Iterator[Component]:
        """The same, only of these components and families; without `sequential` ones."""
        ranks = ((self._places.rank(name), name) for name in set(names) if name in self._places)
        for _, name in sorted(ranks):
            yield from self._at(name)

    def _at(self, place: str) -> Iterator[Component]:
        if parts := self._parts.get(place):
            return reversed(parts.values())
        return iter((self._all[place][1],))

    def as_they_came(self) -> list[Component]:
        """The longest idle first, for checks."""
        return [c for _, c in sorted(self._all.values(), key=lambda one: one[0])]

    def in_use(self) -> set[str]:
        """The families of which a part is leased, for checks."""
        return set(self._used)

    def add(self, c: Component) -> None:
        """The component is idle from now on."""
        self._stamp += 1
        self._all[c.name] = self._stamp, c
        self.chunks += c.chunks
        if c.policy == "sequential":
            self._in_vain[c.name] = c
        elif c.part_of:
            self._parts.setdefault(c.part_of, OrderedDict())[c.name] = c
            self._place(c.part_of)
        else:
            self._places.put(c.name, (_FOR_NOTHING if c.leaves_for_nothing else _IDLE, self._stamp))

    def drop(self, c: Component) -> None:
        """Remove the component, if it is idle."""
        if self._all.pop(c.name, None) is None:
            return
        self.chunks -= c.chunks
        if c.name in self._in_vain:
            del self._in_vain[c.name]
        elif c.part_of:
            del self._parts[c.part_of][c.name]
            self._place(c.part_of)
        else:
            self._places.drop(c.name)

    def use(self, family: str) -> None:
        """One more part of the family is leased."""
        self._used[family] = self._used.get(family, 0) + 1
        self._place(family)

    def unuse(self, family: str) -> None:
        """One part less of the family is leased."""
        self._used[family] -= 1
        if not self._used[family]:
            del self._used[family]
            self._place(family)

    def _place(self, family: str) -> None:
        parts = self._parts.get(family)
        if parts:
            stamp, _ = self._all[next(reversed(parts))]
            self._places.put(family, (_USED if family in self._used else _IDLE, stamp))
        else:
            self._parts.pop(family, None)
            self._places.drop(family)
