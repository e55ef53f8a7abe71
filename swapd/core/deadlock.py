"""Who can never be granted, and who must run first: of holders that wait for each other. Pure.

The classic detection for one pool of interchangeable units (Coffman, Elphick, Shoshani
1971), with chunks as units and threads or tasks as the holders: find an order in which all
who hold and wait can finish; those for whom there is none are deadlocked.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol, Self, TypeVar

Agent = TypeVar("Agent", bound=Hashable)
AnyAgent = TypeVar("AnyAgent", bound=Hashable, contravariant=True)


class Pool(Protocol[AnyAgent]):
    """What is held by agents that wait; less and less, as one after the other runs.

    Whoever holds and does not wait will release in time, and does not count.
    """

    def copy(self) -> Self: ...

    def can_run(self, agent: AnyAgent) -> bool:
        """Whether what it waits for fits beside what is still held."""

    def run(self, agent: AnyAgent) -> None:
        """It releases what it holds."""


AnyPool = TypeVar("AnyPool", bound=Pool)  # type: ignore[type-arg]


def deadlocked(agents: Iterable[Agent], pool: Pool[Agent]) -> set[Agent]:
    """Return those of `agents` that can never be granted. `pool` is what all of them hold."""
    return _left(agents, pool.copy())


def must_run_first(
    agents: Sequence[Agent], pool: AnyPool, fits: Callable[[AnyPool], bool]
) -> set[Agent]:
    """Return who of `agents` must be let in for something to fit; `fits` says whether it does.

    All that can run release what they hold when they have run. The set is a smallest one:
    take any agent out, and those that remain free too little. Of several such sets, the one
    without the last in `agents`. It is empty if nobody need run; else one of it can run now,
    unless what is asked for will never fit.
    """
    first: set[Agent] = set()
    end = len(agents)
    while end:
        # the later ones need not run, from which one on? the more stay idle, the less fits
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
    """Who of `agents` cannot run, though all that can have run."""
    left = set(agents)
    while able := [agent for agent in left if pool.can_run(agent)]:
        for agent in able:
            pool.run(agent)
        left.difference_update(able)
    return left
