"""Of things in the order in which they should go, those that free enough. Pure."""

from collections.abc import Iterable
from typing import TypeVar

Thing = TypeVar("Thing")


def victims(need: int, idle: Iterable[tuple[Thing, int]]) -> list[Thing] | None:
    """The components to evict to free `need` chunks, or None if all are too few.

    `idle` are components and their chunks, in the order in which they should go. Every component
    returned is necessary: oldest first alone would take too many (need 10 with idle a=1, b=10 would
    take both), so the most recent superfluous ones stay.
    """
    chosen, short = oldest(need, idle)
    return None if short > 0 else needed(chosen, short)


def oldest(need: int, idle: Iterable[tuple[Thing, int]]) -> tuple[list[tuple[Thing, int]], int]:
    """The first ones that have `need` chunks, or all; and how many chunks are lacking then."""
    chosen: list[tuple[Thing, int]] = []
    for thing, chunks in idle:
        if need <= 0:
            break
        if chunks:
            chosen.append((thing, chunks))
            need -= chunks
    return chosen, need


def needed(chosen: list[tuple[Thing, int]], short: int) -> list[Thing]:
    """Without the most recent superfluous ones; all, if chunks are lacking."""
    kept: list[Thing] = []
    for thing, chunks in reversed(chosen):
        if short + chunks <= 0:
            short += chunks
        else:
            kept.append(thing)
    return kept[::-1]
