"""The order in which components leave the device. Pure.

`IdleOrder` sorts idle components by eviction, `Holders` leased ones by giving way.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from swapd.core.queue import Ranked
from swapd.core.records import Agent, Component, Key, Lease
from swapd.core.states import State

#: Places in the order of eviction: loads that nobody wants, `sequential` components loaded ahead,
#: scratch that leaves without a copy, unused components and families, families in use, loads that a
#: prefetch wants.
_UNWANTED, _AHEAD, _FOR_NOTHING, _UNUSED, _USED, _COMING = range(6)


class IdleOrder:
    """Idle components in the order of eviction, by the places above.

    Within a place the least recently used goes first (`Component.idle_since`); of unwanted loads
    and components loaded ahead, the newest. The idle parts of a family share the place of the most
    recently used one, which goes first: passes are cyclic, so it is needed last.
    """

    def __init__(self) -> None:
        self._stamp = 0
        self._all: dict[str, Component] = {}
        #: Names of components without a family, of loads, of `sequential` parts, and of families.
        self._places: Ranked[str] = Ranked()
        #: Idle parts of each family, the least recently used first.
        self._parts: dict[str, Ranked[str]] = {}
        #: Number of leased parts of each family.
        self._used: dict[str, int] = {}
        self.chunks = 0

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, name: str) -> bool:
        return name in self._all

    def __iter__(self) -> Iterator[Component]:
        """In the order of eviction. Change nothing meanwhile."""
        return self._at(self._places)

    def among(self, names: Iterable[str]) -> Iterator[Component]:
        """Only these components and families, without those loaded ahead."""
        ranks = ((self._places.rank(name), name) for name in set(names) if name in self._places)
        return self._at(name for rank, name in sorted(ranks) if rank[0] > _AHEAD)

    def _at(self, places: Iterable[str]) -> Iterator[Component]:
        known, families = self._all, self._parts
        for place in places:
            if place in families:
                yield from map(known.__getitem__, reversed(families[place]))
            else:
                yield known[place]

    def add(self, c: Component) -> None:
        self._stamp += 1
        self._all[c.name] = c
        self.chunks += c.chunks
        if c.state is State.LOADING:
            place = _COMING if c.expected else _UNWANTED
            self._places.put(c.name, (place, -self._stamp))
        elif c.policy == "sequential":
            self._places.put(c.name, (_AHEAD, -self._stamp))
        elif c.part_of:
            self._parts.setdefault(c.part_of, Ranked()).put(c.name, (c.idle_since, self._stamp))
            self._place(c.part_of)
        else:
            place = _FOR_NOTHING if c.leaves_for_nothing else _UNUSED
            self._places.put(c.name, (place, c.idle_since, self._stamp))

    def drop(self, c: Component) -> None:
        if self._all.pop(c.name, None) is None:
            return
        self.chunks -= c.chunks
        self._places.drop(c.name)
        if parts := self._parts.get(c.part_of):
            parts.drop(c.name)
            self._place(c.part_of)

    def use(self, family: str) -> None:
        self._used[family] = self._used.get(family, 0) + 1
        if self._used[family] == 1:
            self._place(family)

    def unuse(self, family: str) -> None:
        self._used[family] -= 1
        if not self._used[family]:
            del self._used[family]
            self._place(family)

    def _place(self, family: str) -> None:
        parts = self._parts.get(family)
        if parts:
            self._places.put(family, (_USED if family in self._used else _UNUSED, *parts.last()))
        else:
            self._parts.pop(family, None)
            self._places.drop(family)


@dataclass(slots=True, eq=False)
class Holdings:
    leases: dict[Key, Lease] = field(default_factory=dict)
    components: dict[str, Component] = field(default_factory=dict)
    chunks: int = 0


class Holders:
    """Who holds what. Tells `idle` which families are in use."""

    def __init__(self, idle: IdleOrder) -> None:
        self._idle = idle
        self._seq = 0
        #: Leased components; names of those that may be asked to give way, in that order.
        self.leased: dict[str, Component] = {}
        self._giving_way: Ranked[str] = Ranked()
        self.by_agent: dict[Agent, Holdings] = {}

    def to_give_way(self) -> Iterator[Component]:
        return map(self.leased.__getitem__, self._giving_way)

    def open(self, key: Key, lease: Lease) -> None:
        """`take_up` adds the components of the lease."""
        self.by_agent.setdefault(lease.owner, Holdings()).leases[key] = lease

    def close(self, key: Key, lease: Lease) -> None:
        """Call this after `lay_down` of all components of the lease."""
        leases = self.by_agent[lease.owner].leases
        del leases[key]
        if not leases:
            del self.by_agent[lease.owner]

    def hand(self, key: Key, lease: Lease, agent: int, components: Iterable[Component]) -> None:
        old, new = lease.owner, (lease.session, agent)
        self.by_agent.setdefault(new, Holdings()).leases[key] = lease
        for c in components:
            self._hold(c, new)
            self._unhold(c, old)
        self.close(key, lease)
        lease.agent = agent

    def take_up(self, c: Component, key: Key, agent: Agent) -> None:
        if not c.leases:
            self._seq += 1
            c.leased_seq = self._seq
            self.leased[c.name] = c
            self.rank(c)
            if c.part_of:
                self._idle.use(c.part_of)
        c.leases.add(key)
        c.holders[key[0]] = c.holders.get(key[0], 0) + 1
        self._hold(c, agent)

    def lay_down(self, c: Component, key: Key, agent: Agent) -> None:
        c.leases.discard(key)
        c.holders[key[0]] -= 1
        if not c.holders[key[0]]:
            del c.holders[key[0]]
        self._unhold(c, agent)
        if not c.leases:
            del self.leased[c.name]
            self._giving_way.drop(c.name)
            if c.part_of:
                self._idle.unuse(c.part_of)

    def rank(self, c: Component) -> None:
        """Rank a leased component by its arrival on the device; a loading one comes last."""
        if c.name in self.leased and c.policy != "permanent":
            rank = (c.state is State.LOADING, c.resident_since, c.leased_seq)
            self._giving_way.put(c.name, rank)
        else:
            self._giving_way.drop(c.name)

    def _hold(self, c: Component, agent: Agent) -> None:
        if agent in c.agents:
            c.agents[agent] += 1
        else:
            c.agents[agent] = 1
            held = self.by_agent[agent]
            held.components[c.name] = c
            held.chunks += c.chunks

    def _unhold(self, c: Component, agent: Agent) -> None:
        c.agents[agent] -= 1
        if not c.agents[agent]:
            del c.agents[agent]
            held = self.by_agent[agent]
            del held.components[c.name]
            held.chunks -= c.chunks
