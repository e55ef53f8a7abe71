"""Each stage's swaps and waits on a device, from the swap log of its daemon. Pure.

Labels of a stage's sessions begin with its name. Moves count for the stage that registered the
component, even if another asked for it; waits count for the stage that asked.
"""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from swapd.core import actions, events
from swapd.log.history import Seen, copied_bytes
from swapd.log.records import Record
from swapd.run.several.stages import Told
from swapd.shared.units import seconds, size


class StageOutcome(msgspec.Struct):
    """The sums of one stage, on all devices. `status` is None if it never ended."""

    name: str
    starts: int = 0
    status: int | None = None
    swaps: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    waits: int = 0
    waited_s: float = 0.0
    refusals: int = 0

    def __str__(self) -> str:
        waited = (
            f"{self.waits} requests waited {seconds(self.waited_s)}"
            if self.waits
            else "no request waited"
        )
        refused = f", {self.refusals} refused" if self.refusals else ""
        starts = f", {self.starts} starts" if self.starts > 1 else ""
        ended = f"status {self.status}{starts}" if self.starts else "was not started"
        return (
            f"{self.name}: {self.swaps} swaps, {size(self.bytes_in)} in and "
            f"{size(self.bytes_out)} out; {waited}{refused}; {ended}"
        )


def stage_of(label: str, names: Collection[str]) -> str | None:
    """The stage whose session has this label; None if there is none."""
    name, slash, _ = label.partition("/")
    return name if slash and name in names else None


def outcomes(
    told: Mapping[str, Told], runs: Iterable[Iterable[Record]], since: float
) -> list[StageOutcome]:
    """The sums of each stage since `since`, Unix time. `runs`: the logs of all daemons."""
    found = {name: StageOutcome(name, one.starts, one.status) for name, one in told.items()}
    for records in runs:
        _count(found, records, since)
    return list(found.values())


def _count(found: dict[str, StageOutcome], records: Iterable[Record], since: float) -> None:
    seen = Seen()
    #: Stages by session, and by the names of their components.
    sessions: dict[int, StageOutcome] = {}
    owners: dict[str, StageOutcome] = {}
    for record in records:
        item = record.event or record.action
        match item:
            case events.SessionOpened():
                if name := stage_of(item.label, found):
                    sessions[item.session] = found[name]
            case events.SessionGone():
                sessions.pop(item.session, None)
            case actions.MakeHostCopy():
                owners.pop(item.name, None)
                if item.session in sessions:
                    owners[item.name] = sessions[item.session]
            case events.CopiedIn() | events.CopiedOut() if since <= record.time:
                order = seen.order(item.generation)
                if order is not None and order.name in owners:
                    _add_copy(owners[order.name], order)
            case actions.Grant() if since <= record.time and item.session in sessions:
                if item.waited_s:
                    sessions[item.session].waits += 1
                    sessions[item.session].waited_s += item.waited_s
            case actions.Refuse() if since <= record.time and item.session in sessions:
                sessions[item.session].refusals += not item.tried
            case _:
                pass
        seen.note(record)


def _add_copy(stage: StageOutcome, order: object) -> None:
    if isinstance(order, actions.CopyIn):
        stage.swaps += 1
        stage.bytes_in += copied_bytes(order)
    elif isinstance(order, actions.CopyOut):
        stage.bytes_out += copied_bytes(order)
