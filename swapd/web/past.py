"""When each component was on the device: a mark at each change that a status shows. Pure."""

from collections import deque
from collections.abc import Iterable

from swapd.shared.protocol import ComponentStatus

#: Seconds of the past that it keeps, and most marks of one component.
PAST_S = 300.0
MARKS_MAX = 600
#: Most components, or families.
ROWS_MAX = 500

#: Codes of states: loading, held, leaving; those that are in and have none are `r`.
_CODES = {"loading": "l", "lending": "l", "lent": "h", "leased": "h"}
_CODES |= dict.fromkeys(("stopping", "revoking", "writing back", "reclaiming"), "v")

#: Unix time, code (`o`: out), and the share that is on the device.
Mark = tuple[float, str, float]


class Past:
    """The marks of one daemon's components, by name; the parts of a family have its name."""

    def __init__(self) -> None:
        self._marks: dict[str, deque[Mark]] = {}

    def note(self, components: Iterable[ComponentStatus], now: float) -> None:
        """Take a status. `now`: Unix time."""
        rows: dict[str, list[ComponentStatus]] = {}
        for c in components:
            rows.setdefault(c.part_of or c.name, []).append(c)
        for name in self._marks.keys() - rows.keys():
            del self._marks[name]
        for name, parts in rows.items():
            if name in self._marks or len(self._marks) < ROWS_MAX:
                marks = self._marks.setdefault(name, deque(maxlen=MARKS_MAX))
                _add(marks, (round(now, 2), *_state(parts)), now)

    def since(self, time: float) -> dict[str, list[Mark]]:
        """The marks later than that."""
        found = {name: [m for m in marks if m[0] > time] for name, marks in self._marks.items()}
        return {name: marks for name, marks in found.items() if marks}


def _add(marks: deque[Mark], mark: Mark, now: float) -> None:
    """Add a mark that differs from the last one, and drop the old ones."""
    if not marks or marks[-1][1:] != mark[1:]:
        marks.append(mark)
    while len(marks) > 1 and marks[1][0] < now - PAST_S:
        marks.popleft()


def _state(parts: list[ComponentStatus]) -> tuple[str, float]:
    inside = [part for part in parts if part.inside]
    codes = {_CODES.get(part.state, "r") for part in inside}
    nbytes = sum(part.nbytes for part in parts)
    share = sum(part.nbytes for part in inside) / nbytes if nbytes else float(bool(inside))
    return next((code for code in "hlvr" if code in codes), "o"), round(share, 2)
