"""What the swap log says of engines that take turns."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from swapd.core import actions
from swapd.log.records import Record


class Turn(NamedTuple):
    """A request as the engine saw it; times are those of the swap log's clock, in seconds."""

    component: str
    #: When its first step had ended, and its last began: so long its weights are needed.
    running: float
    ended: float


def copies_in(records: Iterable[Record]) -> list[str]:
    """Which components were copied in, in order."""
    return [one.action.name for one in records if isinstance(one.action, actions.CopyIn)]


def switches(turns: Sequence[Turn]) -> int:
    """How often another engine's request ended than the one before; the first counts too."""
    order = [turn.component for turn in sorted(turns, key=lambda turn: turn.ended)]
    return sum(one != before for one, before in zip(order, ["", *order], strict=False))


def inside(turns: Iterable[Turn], records: Iterable[Record]) -> list[tuple[str, Turn]]:
    """Copies and evictions of a component while a request of its engine was running."""
    found = []
    for record in records:
        action = record.action
        if isinstance(action, actions.CopyIn | actions.Evict):
            found += [
                (type(action).__name__, turn)
                for turn in turns
                if turn.component == action.name and turn.running < record.time < turn.ended
            ]
    return found
