"""Replays a swap log, of one run from its first record on: the same events through a fresh core
must give the same actions. So a production log is a test: `for step in replay(lines): assert
step.actions == step.recorded`."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from swapd.core import Residency
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.log.records import Record, SchemaMismatch, Start, parse
from swapd.shared.errors import UserError


class Step(NamedTuple):
    """One event, with the actions of the core now and those recorded."""

    seq: int
    event: AnyEvent
    actions: list[AnyAction]
    recorded: list[AnyAction]


class ReplayError(UserError):
    pass


def replay(lines: Iterable[bytes | str]) -> Iterator[Step]:
    """Feed the events of a log to a fresh `Residency`. The caller compares the actions. Every line
    must parse. The last event is left out if its recorded actions are incomplete. Raises:
    ReplayError, msgspec.MsgspecError."""
    records = map(parse, lines)
    seq, start = _start(records)
    core = Residency(start.chunks, start.chunk_bytes, start.rules)
    step: Step | None = None
    for record in _without_hole(records, seq + 1):
        if record.event is not None:
            if step is not None:
                yield step
            step = Step(record.seq, record.event, core.handle(record.event), [])
        elif record.action is not None:
            assert step is not None, "an action before any event"
            step.recorded.append(record.action)
    if step is not None and len(step.recorded) == len(step.actions):
        yield step


def _start(records: Iterator[Record]) -> tuple[int, Start]:
    try:
        first = next(records, None)
    except SchemaMismatch as exc:
        raise ReplayError(str(exc)) from exc
    if first is None or first.start is None:
        raise ReplayError("no start record: the log was rotated, or is not one")
    return first.seq, first.start


def _without_hole(records: Iterable[Record], first: int) -> Iterator[Record]:
    """Yield the records of one run, from number `first` on. Raises: ReplayError if one is
    missing."""
    for expected, record in enumerate(records, first):
        if record.seq != expected or record.dropped or record.start is not None:
            raise ReplayError(f"record {expected} is missing: the log has a hole, or two runs")
        yield record
