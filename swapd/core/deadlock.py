"""Who can never be granted, and who must run first: of holders that wait for each other. Pure.

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
    return _left(set(wants), set(), wants, holds, fits)


def must_run_first(
    asked: Set[str],
    beside: Set[str],
    wants: Mapping[Agent, Set[str]],
    holds: Mapping[Agent, Set[str]],
    fits: Callable[[Set[str]], bool],
) -> set[Agent]:
    """Return who must be let in, of those in `wants`, for `asked` to fit beside `beside`.

    All that can run release what they hold when they have run. The set is a smallest one:
    take any agent out, and those that remain free too little. Of several such sets, the one
    without the last in `wants`. It is empty if nobody need run; else one of it can run now,
    unless `asked` will never fit.
    """
    idle: set[Agent] = set()
    for agent in reversed(list(wants)):
        idle.add(agent)
        stays = set(beside).union(*(holds[a] for a in idle))
        left = _left(wants.keys() - idle, stays, wants, holds, fits)
        if not fits(stays.union(asked, *(holds[a] for a in left))):
            idle.remove(agent)
    return wants.keys() - idle


def _left(
    agents: Set[Agent],
    beside: Set[str],
    wants: Mapping[Agent, Set[str]],
    holds: Mapping[Agent, Set[str]],
    fits: Callable[[Set[str]], bool],
) -> set[Agent]:
    """Who of `agents` cannot run beside what stays, though all that can have run."""
    left = set(agents)
    while True:
        held = set(beside).union(*(holds[a] for a in left))
        able = [a for a in left if fits(wants[a] | held)]
        if not able:
            return left
        left.difference_update(able)
