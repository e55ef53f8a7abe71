"""Finds agents that hold leases and wait, and can never be granted or must run first. Pure.

The classic detection for one pool of interchangeable units (Coffman, Elphick, Shoshani 1971), here
chunks: agents are deadlocked if in no order all can finish. An agent that holds and does not wait
will release in time. `admission.py` and `planner.py` act on the result.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Protocol, Self, TypeVar

from swapd.core import eviction, twins
from swapd.core.ledger import Ledger
from swapd.core.records import Agent, Component, Waiter

_seq = attrgetter("seq")

Any = TypeVar("Any", bound=Hashable)
AnyAgent = TypeVar("AnyAgent", bound=Hashable, contravariant=True)

# --- the algorithm -----------------------------------------------------------------------


class Resources(Protocol[AnyAgent]):
    """What waiting agents hold. It shrinks as the agents run, one after the other."""

    def copy(self) -> Self: ...

    def can_run(self, agent: AnyAgent) -> bool:
        """Return whether what the agent waits for fits beside what is still held."""

    def run(self, agent: AnyAgent) -> None:
        """Release all that the agent holds."""


AnyResources = TypeVar("AnyResources", bound=Resources)  # type: ignore[type-arg]


def stuck(agents: Iterable[Any], held: Resources[Any]) -> set[Any]:
    """Return the `agents` that cannot run even after all others that can. Changes `held`."""
    left = set(agents)
    while able := [agent for agent in left if held.can_run(agent)]:
        for agent in able:
            held.run(agent)
        left.difference_update(able)
    return left


def must_run_first(
    agents: Sequence[Any], held: AnyResources, fits: Callable[[AnyResources], bool]
) -> set[Any]:
    """Return the `agents` that must be admitted before a request `fits`. Agents that can run do so,
    and release all they hold.

    The set is minimal: without any of its agents, too little is free. Of several such sets, it is
    the one without the last in `agents`. One of its agents can run now, unless the request will
    never fit.
    """
    first: set[Any] = set()
    end = len(agents)
    while end:
        # Find the first agent from which on no agent need run: the more stay idle, the less fits.
        low, high = 0, end
        while low < high:
            middle = (low + high) // 2
            left = held.copy()
            stuck([*agents[:middle], *first], left)
            low, high = (low, middle) if fits(left) else (middle + 1, high)
        end = low
        if end:
            end -= 1
            first.add(agents[end])
    return first


# --- components as resources -------------------------------------------------------------

#: A component that an agent waits for, and whether it must leave first because the agent needs its
#: new bytes.
Wish = tuple[Component, bool]


class _Held:
    def __init__(self, ledger: Ledger, of: dict[Agent, Iterable[Component]]) -> None:
        self.wishes: dict[Agent, list[Wish]] = {}
        self._ledger = ledger
        self._of = of
        #: Chunks that come free, less those of all held components.
        self._room = ledger.room
        #: How many agents hold each component; how many held components are on the same chunks;
        #: held members by group and side.
        self._holders: dict[str, int] = {}
        self._bodies: dict[Hashable, int] = {}
        self._sides: dict[str, dict[str, int]] = {}
        for held in of.values():
            for c in held:
                self._holders[c.name] = self._holders.get(c.name, 0) + 1
                if self._holders[c.name] == 1:
                    self._count(c, 1)

    def copy(self) -> "_Held":
        other = _Held(self._ledger, {})
        other._of, other.wishes, other._room = self._of, self.wishes, self._room
        other._holders, other._bodies = dict(self._holders), dict(self._bodies)
        other._sides = {group: dict(sides) for group, sides in self._sides.items()}
        return other

    def can_run(self, agent: Agent) -> bool:
        return self.fits(self.wishes[agent])

    def run(self, agent: Agent) -> None:
        for c in self._of[agent]:
            self._holders[c.name] -= 1
            if not self._holders[c.name]:
                self._count(c, -1)

    def _count(self, c: Component, n: int) -> None:
        body, chunks = twins.body(self._ledger, c)
        before = self._bodies.get(body, 0)
        self._bodies[body] = before + n
        if not (before and self._bodies[body]):
            self._room -= n * chunks
        if c.group is not None:
            sides = self._sides.setdefault(c.group, {})
            sides[c.side] = sides.get(c.side, 0) + n
            if not sides[c.side]:
                del sides[c.side]

    def fits(self, wishes: Iterable[Wish]) -> bool:
        room, sides, joined = self._room, dict[str, str](), set[Hashable]()
        for c, anew in wishes:
            if anew and self._holders.get(c.name):
                return False
            body, chunks = (c, c.chunks - c.fixed) if anew else twins.body(self._ledger, c)
            if not self._bodies.get(body) and body not in joined:
                room -= chunks
                joined.add(body)
            if c.group is not None:
                one_side = sides.setdefault(c.group, c.side) == c.side
                if not one_side or not self._sides.get(c.group, {}).keys() <= {c.side}:
                    return False
        return room >= 0


def _held(ledger: Ledger, agents: Iterable[Agent], beside: Agent | None = None) -> _Held:
    by_agent = ledger.holders.by_agent
    all_of = [*agents, beside] if beside in by_agent else agents
    held = _Held(ledger, {a: by_agent[a].components.values() for a in all_of if a})
    for agent in agents:
        held.wishes[agent] = _wishes(ledger, ledger.queue.holding[agent].values())
    return held


def _wishes(ledger: Ledger, waiters: Iterable[Waiter]) -> list[Wish]:
    wishes: dict[str, Wish] = {}
    for w in waiters:
        for name in w.names:
            c = ledger.components[name]
            wishes[name] = c, eviction.must_leave_first(c, w)
    return list(wishes.values())


def deadlocked(ledger: Ledger) -> list[Waiter]:
    """Return the waiters that can never be granted, by arrival."""
    agents = _in_doubt(ledger)
    if not agents:
        return []
    return _waiters_of(ledger, stuck(agents, _held(ledger, agents)))


def overtakers(ledger: Ledger, head: Waiter) -> list[Waiter]:
    """Return the waiters to admit before `head`: their agents hold components that it needs."""
    holding, holders = ledger.queue.holding, ledger.holders.by_agent
    if not holding or _fits_beside_all(ledger, head):
        return []
    agents = [a for a in holding if a != head.owner and a in holders]
    agents.sort(key=lambda agent: next(iter(holding[agent].values())).seq)
    wishes = _wishes(ledger, [head])
    held = _held(ledger, agents, beside=head.owner)
    return _waiters_of(ledger, must_run_first(agents, held, lambda left: left.fits(wishes)))


def that_could_take_old(ledger: Ledger, waiters: list[Waiter]) -> Waiter | None:
    """Return the newest waiter that may get old bytes instead, and does not yet."""
    could = (
        w
        for w in waiters
        for c in ledger.named(w.names)
        if eviction.must_leave_first(c, w) and w.session in c.holders
    )
    return max(could, key=_seq, default=None)


def _rooms(ledger: Ledger, *more: Agent) -> Iterator[int]:
    """Yield lower bounds for the room beside what waiting agents and `more` hold: a quick one, then
    one that counts a component once, though thousands of tasks may hold it."""
    by_agent = ledger.holders.by_agent
    agents = ledger.queue.holding.keys() | set(more)
    held = [by_agent[agent] for agent in agents if agent in by_agent]
    yield ledger.room - sum([one.chunks for one in held])
    components = {name: c for one in held for name, c in one.components.items()}
    yield ledger.room - sum([c.chunks for c in components.values()])


def _in_doubt(ledger: Ledger) -> list[Agent]:
    holding = ledger.queue.holding
    agents = [agent for agent in holding if agent in ledger.holders.by_agent]
    for room in _rooms(ledger):
        agents = [a for a in agents if not _surely_fit(ledger, holding[a].values(), room)]
        if not agents:
            break
    return agents


def _surely_fit(ledger: Ledger, waiters: Iterable[Waiter], room: int) -> bool:
    """A quick check, which may wrongly say no."""
    for w in waiters:
        for c in ledger.named(w.names):
            room -= c.chunks
            if c.group is not None or c.superseded:
                return False
    return room >= 0


def _fits_beside_all(ledger: Ledger, head: Waiter) -> bool:
    return any(_surely_fit(ledger, [head], room) for room in _rooms(ledger, head.owner))


def _waiters_of(ledger: Ledger, agents: set[Agent]) -> list[Waiter]:
    return sorted((w for a in agents for w in ledger.queue.holding[a].values()), key=_seq)
