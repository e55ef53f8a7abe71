"""Finds agents that can never be granted, and agents that must run first. Pure.

The classic detection for one pool of interchangeable units (Coffman, Elphick, Shoshani 1971), with
chunks as units and threads or tasks as the holders: find an order in which all agents that hold and
wait can finish. Agents outside every such order are deadlocked.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol, Self, TypeVar

Agent = TypeVar("Agent", bound=Hashable)
AnyAgent = TypeVar("AnyAgent", bound=Hashable, contravariant=True)


class Pool(Protocol[AnyAgent]):
    """The holdings of agents that wait; they shrink as one agent after the other runs.

    An agent that holds and does not wait will release in time, and does not count.
    """

    def copy(self) -> Self: ...

    def can_run(self, agent: AnyAgent) -> bool:
        """Whether its request fits beside the remaining holdings."""

    def run(self, agent: AnyAgent) -> None:
        """The agent releases all it holds."""


AnyPool = TypeVar("AnyPool", bound=Pool)  # type: ignore[type-arg]


def deadlocked(agents: Iterable[Agent], pool: Pool[Agent]) -> set[Agent]:
    """Return those of `agents` that can never be granted. `pool` has the holdings of all."""
    return _left(agents, pool.copy())


def must_run_first(
    agents: Sequence[Agent], pool: AnyPool, fits: Callable[[AnyPool], bool]
) -> set[Agent]:
    """Return the `agents` that must be admitted for a request to fit; `fits` says whether it does.

    Agents that can run do so, and release all they hold. The set is minimal: without any one of its
    agents, the others free too little. Of several such sets, it is the one without the last in
    `agents`. It is empty if no agent needs to run. Otherwise one of its agents can run now, unless
    the request will never fit.
    """
    first: set[Agent] = set()
    end = len(agents)
    while end:
        # from which agent on need the later ones not run? the more stay idle, the less fits
        low, high = 0, end
        while low < high:
            middle = (low + high) // 2
            left = pool.copy()
            _left([*agents[:middle], *first], left)
            low, high = (low, middle) if fits(left) else (middle + 1, high)
        end = low
        if end:
            end -= 1
            first.add(agents[end])
    return first


def _left(agents: Iterable[Agent], pool: Pool[Agent]) -> set[Agent]:
    """The `agents` that cannot run, even after all others that can have run."""
    left = set(agents)
    while able := [agent for agent in left if pool.can_run(agent)]:
        for agent in able:
            pool.run(agent)
        left.difference_update(able)
    return left
