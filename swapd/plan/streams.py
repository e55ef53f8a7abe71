"""What a stage whose layers stream needs and costs, with few or many of them. Pure."""

from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec.structs import replace

from swapd.plan import kv
from swapd.plan.demands import Demand
from swapd_client.vllm.window_size import slots_of

What = Literal["fastest", "balanced", "least memory"]


class StreamPoint(msgspec.Struct, frozen=True):
    """A stage whose layers stream, with so many of them."""

    name: str
    what: What
    layers: int
    streamed: int
    slots: int
    #: Its weights that are in during a turn; those that stay then, without the window, as the
    #: stage's setting `resident` takes them; and the bytes that each step copies.
    turn_bytes: int
    resident_bytes: int
    step_bytes: int
    #: An estimate: the time of these copies. A step that computes longer hides them.
    step_s: float
    #: The largest KV cache beside it, and its tokens, if known.
    cache_bytes: int
    cache_tokens: int


def points(claim: Demand, room: int, bytes_per_s: float) -> Iterator[StreamPoint]:
    """Of a stage that streams; `room`: the bytes of the arena for its turn."""
    if (part := claim.streams) is None or not part.streamed:
        return
    least, layers = part.streamed, part.each
    middle = (least + layers) // 2
    found: dict[int, What] = {layers: "least memory", middle: "balanced", least: "fastest"}
    for number, what in reversed(found.items()):
        slots = part.slots if number == least else slots_of(number, layers, layers)
        own = replace(part, streamed=number, slots=slots)
        parts = tuple(own if p is part else p for p in claim.parts)
        cache = claim.cache_bytes(room - replace(claim, parts=parts).turning(0))
        yield StreamPoint(
            name=claim.name,
            what=what,
            layers=layers,
            streamed=number,
            slots=slots,
            turn_bytes=own.taken,
            resident_bytes=part.nbytes - number * part.each_bytes,
            step_bytes=number * part.each_bytes,
            step_s=number * part.each_bytes / bytes_per_s,
            cache_bytes=cache,
            cache_tokens=kv.tokens_in(claim.cache, cache) if claim.cache else 0,
        )
