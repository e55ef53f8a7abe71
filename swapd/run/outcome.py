"""Swaps and waits of a run, by device and by stage, from the daemons' swap logs. Pure.

Labels of a stage's sessions begin with its name. Moves count for the stage that registered the
component, even if another stage asked for it; waits count for the stage that asked.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from swapd.core import actions, events
from swapd.log.history import RecordContext, copied_bytes
from swapd.log.records import Record
from swapd.run.stages import StageState
from swapd.shared.text import counted
from swapd.shared.units import seconds, size


class Sums(msgspec.Struct, kw_only=True):
    """`waited_s` is the sum over all requests that waited."""

    swaps: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    waits: int = 0
    waited_s: float = 0.0
    refusals: int = 0

    def __str__(self) -> str:
        waited = f"{counted(self.waits, 'request')} waited {seconds(self.waited_s)}"
        refused = f", {self.refusals} refused" if self.refusals else ""
        return (
            f"{counted(self.swaps, 'swap')}, "
            f"{size(self.bytes_in)} in and {size(self.bytes_out)} out; "
            f"{waited if self.waits else 'no request waited'}{refused}"
        )

    def add_copy(self, order: actions.CopyIn | actions.CopyOut) -> None:
        if isinstance(order, actions.CopyIn):
            self.swaps += not order.joins
            self.bytes_in += copied_bytes(order)
        else:
            self.bytes_out += copied_bytes(order)

    def add_request(self, ended: actions.Grant | actions.Refuse) -> None:
        if isinstance(ended, actions.Refuse):
            self.refusals += not ended.tried
        elif ended.waited_s:
            self.waits += 1
            self.waited_s += ended.waited_s


class Outcome(Sums, kw_only=True):
    device: str = ""
    budget_bytes: int = 0
    peak_bytes: int = 0

    def __str__(self) -> str:
        used = f"at most {size(self.peak_bytes)} of {size(self.budget_bytes)} used"
        return f"{self.device}: {super().__str__()}; {used}"


class StageOutcome(Sums, kw_only=True):
    name: str
    starts: int = 0
    status: int | None = None

    def __str__(self) -> str:
        starts = f", {self.starts} starts" if self.starts > 1 else ""
        ended = f"status {self.status}{starts}" if self.starts else "was not started"
        return f"{self.name}: {super().__str__()}; {ended}"


def stage_of(label: str, names: Collection[str]) -> str | None:
    name, slash, _ = label.partition("/")
    return name if slash and name in names else None


def of_device(records: Iterable[Record], since: float) -> Outcome:
    """Sum up the log of one device's daemons since `since`, on their monotonic clock, which no one
    sets. Memory already in use counts as used."""
    return _counted(records, since, {})


def of_stages(
    states: Mapping[str, StageState], logs: Iterable[Iterable[Record]], since: float
) -> list[StageOutcome]:
    """Sum up each stage since `since`, as in `of_device`. `logs`: those of all devices."""
    found = {
        name: StageOutcome(name=name, starts=state.starts, status=state.status)
        for name, state in states.items()
    }
    for records in logs:
        _counted(records, since, found)
    return list(found.values())


#: Stages by their sessions, and by the components that these registered.
_Owners = dict[int | str, StageOutcome]


def _note(item: object, owners: _Owners, stages: Mapping[str, StageOutcome]) -> None:
    match item:
        case events.SessionOpened():
            if name := stage_of(item.label, stages):
                owners[item.session] = stages[name]
        case actions.MakeHostCopy():
            owners.pop(item.name, None)
            if item.session in owners:
                owners[item.name] = owners[item.session]


def _counted(
    records: Iterable[Record], since: float, stages: Mapping[str, StageOutcome]
) -> Outcome:
    found, seen, chunk, used = Outcome(), RecordContext(), 0, 0
    owners: _Owners = {}
    counts = False
    for record in records:
        if record.start is not None:  # the next daemon counts sessions and copies anew
            found.device, chunk = record.start.device, record.start.chunk_bytes
            found.budget_bytes = record.start.chunks * chunk
            seen, owners = RecordContext(), {}
        elif record.event is not None:
            counts = since <= record.event.now
        item = record.event or record.action
        _note(item, owners, stages)
        if isinstance(item, actions.CopyIn | actions.Lend):
            in_use = item.in_use * chunk
            used = max(used, in_use) if counts else in_use
        if counts:
            _add(item, found, seen, owners)
        seen.note(record)
    found.peak_bytes = used
    return found


def _add(item: object, found: Outcome, seen: RecordContext, owners: _Owners) -> None:
    match item:
        case events.CopiedIn() | events.CopiedOut():
            order = seen.order(item.generation)
            if isinstance(order, actions.CopyIn | actions.CopyOut):
                for sums in filter(None, (found, owners.get(order.name))):
                    sums.add_copy(order)
        case actions.Grant() | actions.Refuse():
            for sums in filter(None, (found, owners.get(item.session))):
                sums.add_request(item)
