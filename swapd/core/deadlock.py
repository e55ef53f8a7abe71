"""Who can never be granted: holders that all wait for each other. Pure.

The classic detection for one pool of interchangeable units (Coffman, Elphick, Shoshani
1971), with chunks as units and threads or tasks as the holders: find an order in which all
who hold and wait can finish; those for whom there is none are deadlocked.
"""

from collections.abc import Callable, Hashable, Mapping, Set
from typing import TypeVar

Agent = TypeVar("Agent", bound=Hashable)


def deadlocked(
    wants: Mapping[Agent, Set[str]],
    holds: Mapping[Agent, Set[str]],
    fits: Callable[[Set[str]], bool],
) -> set[Agent]:
    """Return the agents that can never be granted.

    `wants` has every agent that waits while it holds; `holds` what each of them holds.
    `fits` says whether a set of components can be resident together. Whoever holds and
    does not wait will release in time, and does not count.
    """
    stuck = set(wants)
    while True:
        held: set[str] = set().union(*(holds[a] for a in stuck))
        able = [a for a in stuck if fits(wants[a] | held)]
        if not able:
            return stuck
        stuck.difference_update(able)
