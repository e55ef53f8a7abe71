"""The holdings of agents, in sums that are kept up to date, and the room beside them. Pure.

Most leased components are *plain*: one agent alone holds them, and only their number of chunks
matters. For these, each agent has just a sum. The others are kept by name: components with several
agents, members of a group, `permanent` ones, and those that were updated meanwhile.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from swapd.core.orders import EvictionOrder, Ranked
from swapd.core.records import Agent, Component, Key, Lease
from swapd.core.states import State

#: A component that a request waits for, and whether it has to be loaded anew: its new bytes cannot
#: be in beside the old ones.
Wish = tuple[Component, bool]


@dataclass(slots=True, eq=False)
class Holdings:
    """The leases and components of one agent."""

    leases: dict[Key, Lease] = field(default_factory=dict)
    #: Chunks of its plain components.
    plain_chunks: int = 0
    #: Its other components.
    special: dict[str, Component] = field(default_factory=dict)


def is_plain(c: Component) -> bool:
    """Whether only the number of its chunks matters for a leased component."""
    return len(c.agents) == 1 and c.group is None and not c.fixed and not c.superseded


class Beside:
    """The holdings of some agents together, and the room beside them."""

    def __init__(self) -> None:
        self._plain: dict[Agent, int] = {}
        self._special: dict[str, int] = {}
        #: Number of special components on each side of each group.
        self._sides: dict[str, dict[str, int]] = {}
        #: Chunks of all their components, except those that never come free anyway.
        self.chunks = 0

    def __contains__(self, agent: Agent) -> bool:
        return agent in self._plain

    def add(self, agent: Agent, held: Holdings) -> None:
        """Add `agent`, which was not among them."""
        self._plain[agent] = 0
        self.add_plain(agent, held.plain_chunks)
        for c in held.special.values():
            self.add_special(c)

    def remove(self, agent: Agent, held: Holdings) -> None:
        """Remove `agent`; `held` is the same as when it was added."""
        self.chunks -= self._plain.pop(agent)
        for c in held.special.values():
            self.drop_special(c)

    def add_plain(self, agent: Agent, chunks: int) -> None:
        """One of them holds so many more plain chunks, or fewer."""
        self._plain[agent] += chunks
        self.chunks += chunks

    def add_special(self, c: Component) -> None:
        """One of them holds `c` from now on."""
        self._special[c.name] = self._special.get(c.name, 0) + 1
        if self._special[c.name] == 1:
            self._count(c, 1)

    def drop_special(self, c: Component) -> None:
        """One of them no longer holds `c`, which is the same as when it was added."""
        self._special[c.name] -= 1
        if not self._special[c.name]:
            del self._special[c.name]
            self._count(c, -1)

    def content(self) -> tuple[object, ...]:
        """Its whole state, for checks."""
        return self._plain, self._special, {g: s for g, s in self._sides.items() if s}, self.chunks

    def copy(self) -> "Beside":
        other = Beside()
        other._plain, other._special = dict(self._plain), dict(self._special)
        other._sides = {group: dict(sides) for group, sides in self._sides.items()}
        other.chunks = self.chunks
        return other

    def fits(self, wishes: Iterable[Wish], room: int) -> bool:
        """Whether all of these can be in together, beside all components that are held.

        `room`: all chunks but those that never come free.
        """
        chunks, sides = self.chunks, dict[str, str]()
        for c, anew in wishes:
            if self._holds(c):
                if anew:
                    return False
            else:
                chunks += c.chunks - c.fixed
            if c.group is not None and not self._one_side(c, sides):
                return False
        return chunks <= room

    def _holds(self, c: Component) -> bool:
        return c.name in self._special or any(agent in self._plain for agent in c.agents)

    def _one_side(self, c: Component, sides: dict[str, str]) -> bool:
        """Whether no held component, and none in `sides`, excludes `c`."""
        assert c.group is not None
        side = c.part_of or c.name
        held = self._sides.get(c.group, {})
        return sides.setdefault(c.group, side) == side and held.keys() <= {side}

    def _count(self, c: Component, n: int) -> None:
        self.chunks += n * (c.chunks - c.fixed)
        if c.group is None:
            return
        sides = self._sides.setdefault(c.group, {})
        side = c.part_of or c.name
        sides[side] = sides.get(side, 0) + n
        if not sides[side]:
            del sides[side]


class Holders:
    """The holders of each component, in several orders.

    It tells `idle` which families are in use.
    """

    def __init__(self, idle: EvictionOrder) -> None:
        self._idle = idle
        self._seq = 0
        #: Leased components; and the names of those that may be asked to give way, in that order.
        self.leased: dict[str, Component] = {}
        self._giving_way: Ranked[str] = Ranked()
        #: The holdings of each agent that has a lease.
        self.by_agent: dict[Agent, Holdings] = {}
        #: The holdings of those agents that wait meanwhile (`wait`, `wait_no_more`).
        self.waiting = Beside()

    def to_give_way(self) -> Iterator[Component]:
        """The leased components that may be asked to give way, in order."""
        return (self.leased[name] for name in self._giving_way)

    def wait(self, agent: Agent) -> None:
        """The agent waits from now on, regardless of its holdings now and later."""
        if agent not in self.waiting:
            self.waiting.add(agent, self.by_agent.get(agent, Holdings()))

    def wait_no_more(self, agent: Agent) -> None:
        self.waiting.remove(agent, self.by_agent.get(agent, Holdings()))

    def open(self, key: Key, lease: Lease) -> None:
        """There is a lease; `take_up` adds its components."""
        self.by_agent.setdefault(lease.owner, Holdings()).leases[key] = lease

    def close(self, key: Key, lease: Lease) -> None:
        """The lease is gone, after `lay_down` of all its components."""
        leases = self.by_agent[lease.owner].leases
        del leases[key]
        if not leases:
            del self.by_agent[lease.owner]

    def hand(self, key: Key, lease: Lease, agent: int, components: Iterable[Component]) -> None:
        """The lease is that of another agent of its session from now on."""
        old, new = lease.owner, (lease.session, agent)
        self.by_agent.setdefault(new, Holdings()).leases[key] = lease
        for c in components:
            with self.reclassified(c):
                c.agents[new] = c.agents.get(new, 0) + 1
                c.agents[old] -= 1
                if not c.agents[old]:
                    del c.agents[old]
        self.close(key, lease)
        lease.agent = agent

    def take_up(self, c: Component, key: Key, agent: Agent) -> None:
        """This lease of `agent` holds it from now on."""
        if not c.leases:
            self._seq += 1
            c.leased_seq = self._seq
            self.leased[c.name] = c
            self.rank(c)
            if c.part_of:
                self._idle.use(c.part_of)
        c.leases.add(key)
        c.holders[key[0]] = c.holders.get(key[0], 0) + 1
        if agent in c.agents:
            c.agents[agent] += 1
        elif len(c.agents) == 1:  # then one agent alone no longer holds it
            with self.reclassified(c):
                c.agents[agent] = 1
        else:
            c.agents[agent] = 1
            self._note(c, agent)

    def lay_down(self, c: Component, key: Key, agent: Agent) -> None:
        """This lease of `agent` holds it no longer."""
        c.leases.discard(key)
        c.holders[key[0]] -= 1
        if not c.holders[key[0]]:
            del c.holders[key[0]]
        if c.agents[agent] > 1:
            c.agents[agent] -= 1
        elif len(c.agents) == 2:  # then one agent alone holds it again
            with self.reclassified(c):
                del c.agents[agent]
        else:
            self._unnote(c, agent)
            del c.agents[agent]
        if not c.leases:
            del self.leased[c.name]
            self._giving_way.drop(c.name)
            if c.part_of:
                self._idle.unuse(c.part_of)

    def rank(self, c: Component) -> None:
        """Sort `c` in by when it gives way: in order of arrival on the device; loading ones
        last."""
        if c.name in self.leased and c.policy != "permanent":
            rank = (c.state is State.LOADING, c.resident_since, c.leased_seq)
            self._giving_way.put(c.name, rank)
        else:
            self._giving_way.drop(c.name)

    @contextmanager
    def reclassified(self, c: Component) -> Iterator[None]:
        """Change attributes of `c` that decide whether it is plain only inside this context."""
        for agent in c.agents:
            self._unnote(c, agent)
        yield
        for agent in c.agents:
            self._note(c, agent)

    def _note(self, c: Component, agent: Agent) -> None:
        held = self.by_agent[agent]
        if is_plain(c):
            held.plain_chunks += c.chunks
            if agent in self.waiting:
                self.waiting.add_plain(agent, c.chunks)
        else:
            held.special[c.name] = c
            if agent in self.waiting:
                self.waiting.add_special(c)

    def _unnote(self, c: Component, agent: Agent) -> None:
        held = self.by_agent[agent]
        if c.name not in held.special:
            held.plain_chunks -= c.chunks
            if agent in self.waiting:
                self.waiting.add_plain(agent, -c.chunks)
        else:
            del held.special[c.name]
            if agent in self.waiting:
                self.waiting.drop_special(c)
