"""Folds loads and evictions of the parts of one component into one line.

A streamed component loads its blocks pass by pass, and a component by layers gives up many layers
for one request. Pure: records in, lines out. `render.py` words single lines.
"""

from collections.abc import Iterator
from typing import NamedTuple

from swapd.cli.render import GOOD, MOVE, Phrase, ShownLine, in_columns, line, speed, why_evicted
from swapd.core import actions, events
from swapd.log.history import RecordContext, copied_bytes
from swapd.log.records import Record
from swapd.shared.text import plain
from swapd.shared.units import size


class _Move(NamedTuple):
    """A part that was loaded, written back or evicted, at the time `at`.

    `took`: seconds of the copy. `passed`: the part left by itself, once the pass had gone on.
    """

    verb: str
    name: str
    nbytes: int
    at: float
    alone: ShownLine
    took: float = 0.0
    why: str = ""
    passed: bool = False


class _Run:
    def __init__(self, family: str) -> None:
        self.family = family
        self.moved: list[_Move] = []

    def goes_on_with(self, moved: _Move) -> bool:
        """Tell whether `moved` is in the same pass: a second load of a part begins the next."""
        came = {one.name for one in self.moved if one.verb == "in"}
        return moved.verb != "in" or moved.name not in came

    @property
    def is_stream(self) -> bool:
        """Whether its parts leave by themselves, so that it continues across records of others."""
        return any(one.passed for one in self.moved)

    def lines(self, seen: RecordContext) -> Iterator[ShownLine]:
        if len(self.moved) <= _FEW:
            yield from (one.alone for one in self.moved)
        elif self.is_stream:
            yield self._streamed(seen)
        else:
            for verb, why in dict.fromkeys((one.verb, one.why) for one in self.moved):
                yield self._together(verb, why, seen)

    def _streamed(self, seen: RecordContext) -> ShownLine:
        came = [one for one in self.moved if one.verb == "in"]
        left = sum(one.verb == "evict" for one in self.moved)
        detail = f"{_amount(came)}  {_speed(came)}  {len(came)} blocks in, {left} out"
        return in_columns(
            self.moved[-1].at, Phrase("stream", plain(self.family), detail, GOOD), seen
        )

    def _together(self, verb: str, why: str, seen: RecordContext) -> ShownLine:
        ours = [one for one in self.moved if (one.verb, one.why) == (verb, why)]
        detail = f"{_amount(ours)}  "
        if verb != "evict":
            detail += f"{_speed(ours)}  "
        detail += f"in {len(ours)} parts" + (f", {why}" if why else "")
        style = GOOD if verb == "in" else MOVE
        return in_columns(ours[-1].at, Phrase(verb, plain(self.family), detail, style), seen)


#: Runs of so few moves keep their single lines.
_FEW = 2


class Folding:
    """Lines of records, with runs of parts folded. Pass all records in order, then `flush`."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def lines(self, record: Record, seen: RecordContext) -> Iterator[ShownLine]:
        """Yield the lines to show now. `seen` holds the records before this one."""
        shown = line(record, seen)
        left = record.action
        if shown is None or (isinstance(left, actions.Evicted) and left.name in seen.part_of):
            return
        moved = _moved(record, seen, shown)
        family = seen.part_of.get(moved.name) if moved else None
        if moved is None or family is None:
            yield from self._end(record, seen)
            yield shown
            return
        run = self._runs.get(family)
        if run is not None and not run.goes_on_with(moved):
            yield from self._runs.pop(family).lines(seen)
            run = None
        if run is None:
            run = self._runs[family] = _Run(family)
        run.moved.append(moved)

    def flush(self, seen: RecordContext) -> Iterator[ShownLine]:
        runs, self._runs = self._runs, {}
        for run in runs.values():
            yield from run.lines(seen)

    def _end(self, record: Record, seen: RecordContext) -> Iterator[ShownLine]:
        about = {seen.part_of.get(name, name) for name in seen.about(record)}
        for family in [f for f, run in self._runs.items() if f in about or not run.is_stream]:
            yield from self._runs.pop(family).lines(seen)


def _moved(record: Record, seen: RecordContext, shown: ShownLine) -> _Move | None:
    match record.event or record.action:
        case events.CopiedIn() | events.CopiedOut() as e if e.generation in seen.copies:
            order, began = seen.copies[e.generation]
            if not isinstance(order, actions.CopyIn | actions.CopyOut) or order.only is not None:
                return None
            verb, why = ("in", "") if isinstance(e, events.CopiedIn) else ("out", "written back")
            took = record.time - began
            return _Move(verb, order.name, copied_bytes(order), record.time, shown, took, why)
        case actions.Evict() as a if a.name not in seen.scratch:
            nbytes = seen.sizes.get(a.name, 0)
            why = why_evicted(a, seen)
            passed = a.reason == "sequential"
            return _Move("evict", a.name, nbytes, record.time, shown, why=why, passed=passed)
        case _:
            return None


def _amount(moved: list[_Move]) -> str:
    return f"{size(sum(one.nbytes for one in moved)):>9}"


def _speed(copied: list[_Move]) -> str:
    took = copied[-1].at - (copied[0].at - copied[0].took)
    return speed(sum(one.nbytes for one in copied), took)
