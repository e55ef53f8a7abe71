"""A command's swaps and waits on a device, from the swap log of its daemon. Pure."""

from collections.abc import Iterable

import msgspec

from swapd.core import actions, events
from swapd.log.history import Seen, copied_bytes
from swapd.log.records import Record
from swapd.shared.units import seconds, size


class Outcome(msgspec.Struct, frozen=True):
    """The sums since a moment. Bytes; `waited_s` is the sum over all requests that waited."""

    device: str
    budget_bytes: int
    peak_bytes: int
    swaps: int
    evictions: int
    bytes_in: int
    bytes_out: int
    waits: int
    waited_s: float
    refusals: int

    def __str__(self) -> str:
        waited = (
            f"{self.waits} requests waited {seconds(self.waited_s)}"
            if self.waits
            else "no request waited"
        )
        refused = f", {self.refusals} refused" if self.refusals else ""
        return (
            f"{self.device}: {self.swaps} swaps, {size(self.bytes_in)} in and "
            f"{size(self.bytes_out)} out; {waited}{refused}; at most {size(self.peak_bytes)} of "
            f"{size(self.budget_bytes)} used"
        )


def outcome(records: Iterable[Record], since: float) -> Outcome:
    """Sums of one daemon's run since `since`, Unix time; memory in use before counts as used."""
    seen = Seen()
    swaps = evictions = bytes_in = bytes_out = waits = refusals = 0
    waited, device, budget, chunk, used = 0.0, "", 0, 0, 0
    for record in records:
        if record.start is not None:
            device, chunk = record.start.device, record.start.chunk_bytes
            budget = record.start.chunks * chunk
        ours = since <= record.time
        match record.event or record.action:
            case events.CopiedIn() | events.CopiedOut() as e:
                order = seen.order(e.generation)
                if ours and isinstance(order, actions.CopyIn):
                    swaps += 1
                    bytes_in += copied_bytes(order)
                elif ours and isinstance(order, actions.CopyOut):
                    bytes_out += copied_bytes(order)
            case actions.CopyIn() | actions.Lend() as a:
                used = max(used, a.in_use) if ours else a.in_use
            case actions.Evict():
                evictions += ours
            case actions.Grant() as a if ours and a.waited_s:
                waits += 1
                waited += a.waited_s
            case actions.Refuse() as a if ours and not a.tried:
                refusals += 1
            case _:
                pass
        seen.note(record)
    return Outcome(
        device, budget, used * chunk, swaps, evictions, bytes_in, bytes_out, waits, waited, refusals
    )
