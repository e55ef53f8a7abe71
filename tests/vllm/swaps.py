"""Reads the swap log of engines that take turns."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from swapd.core import actions
from swapd.log.records import Record


class Turn(NamedTuple):
    """A request as the engine saw it; times are those of the swap log's clock, in seconds."""

    component: str
    #: The end of its first step, and the begin of its last: it needs its weights between them.
    running: float
    ended: float


def whole(name: str) -> str:
    """The family of a part; any other component itself."""
    return name.partition("/")[0]


def copies_in(records: Iterable[Record]) -> list[str]:
    """The components copied in, in order; parts of a family that came together count once."""
    found: list[str] = []
    together: set[str] = set()
    for record in records:
        if not isinstance(record.action, actions.CopyIn):
            continue
        name = record.action.name
        if not found or found[-1] != whole(name) or name in together:
            found.append(whole(name))
            together.clear()
        together.add(name)
    return found


def switches(turns: Sequence[Turn]) -> int:
    """How often a request of another engine ended than before; the first counts too."""
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
                if turn.component == whole(action.name) and turn.running < record.time < turn.ended
            ]
    return found
