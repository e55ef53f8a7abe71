"""The memory of a daemon that stages share: what it must hold, and the bytes of a round. Pure.

A round is one turn of each stage, in a fixed order. A turn needs all weights of its stage, and its
KV cache. A KV cache is never copied, so only weights move.
"""

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from swapd.plan.advice import CHUNK_BYTES, lru_bytes
from swapd.plan.demands import Demand, WeightGroup


class Turn(msgspec.Struct, frozen=True):
    """The memory of one stage's turn, without permanent components, in bytes."""

    #: Weights: their size in an arena, and the bytes that a load copies.
    taken: int
    copied: int
    cache: int = 0
    #: Decoder layers; size and copied bytes of a layer.
    layers: int = 1
    layer_taken: int = 0
    layer_bytes: int = 0


def whole_bytes(turns: Sequence[Turn], room: int) -> int:
    if not turns:
        return 0
    sizes = [turn.taken + turn.cache for turn in turns]
    return lru_bytes(sizes, room, [turn.copied for turn in turns]) or 0


def by_layer_bytes(turns: Sequence[Turn], room: int, chunk: int = CHUNK_BYTES) -> int:
    """Return the bytes of a round in which the fewest layers leave, and the same each time.

    The result is at most twice the bytes by which the stages exceed `room`, plus a layer of each
    stage, and never more than `whole_bytes`. `room` must hold each turn.
    """
    kept = kept_bytes(turns, room, chunk)
    moved = sum(_leaving(turn, n) for turn, n in zip(turns, kept, strict=True))
    return min(moved, whole_bytes(turns, room))


def _leaving(turn: Turn, kept: int) -> int:
    """Return the bytes to copy again if `kept` stay. Whole layers leave first, the rest last."""
    layers = -(-(turn.taken - kept) // (turn.layer_taken or turn.taken or 1))
    if layers > turn.layers or not turn.layer_bytes:
        return turn.copied if layers else 0
    return min(turn.copied, layers * turn.layer_bytes)


def kept_bytes(turns: Sequence[Turn], room: int, chunk: int = CHUNK_BYTES) -> list[int]:
    """Return the bytes of each stage that are never evicted, with the largest possible total.

    In each turn, `room` holds the whole turn and the kept bytes of the other stages. So the total
    is at most the rest of `room` plus the turn's own kept bytes. In whole chunks of `chunk` bytes.
    """
    spare = [room - turn.taken - turn.cache for turn in turns]
    most = [turn.taken for turn in turns]

    def least(total: int) -> list[int]:
        return [max(0, total - beside) for beside in spare]

    def possible(total: int) -> bool:
        own = least(total)
        return sum(own) <= total and all(n <= top for n, top in zip(own, most, strict=True))

    total = largest_of(sum(most) // chunk, lambda n: possible(n * chunk)) * chunk
    kept = least(total)
    left = total - sum(kept)
    for number in sorted(range(len(turns)), key=lambda n: turns[n].taken):  # small stages first
        more = min(left, most[number] - kept[number])
        kept[number] += more
        left -= more
    return kept


def largest_of(most: int, possible: Callable[[int], bool]) -> int:
    """Return the largest possible number up to `most`. Numbers below a possible one must be
    possible; 0 always is."""
    return bisect(range(1, most + 1), False, key=lambda n: not possible(n))


class SharedArena(NamedTuple):
    ours: Sequence[Demand]
    nbytes: int

    @property
    def stays(self) -> int:
        return sum(c.staying for c in self.ours)

    def needed(self, caches: Mapping[str, int]) -> int:
        return self.stays + max((c.turning(caches[c.name]) for c in self.ours), default=0)

    def room_of(self, claim: Demand) -> int:
        return self.nbytes - self.stays - claim.cache_bytes()

    def lacks(self, claim: Demand) -> bool:
        part = claim.streams if claim.ours else None
        could = part is not None and not part.streamed
        return could and claim.turning(0) > self.room_of(claim)

    def whole(self, caches: Mapping[str, int]) -> int:
        return sum(p.taken for c in self.ours for p in c.parts) + sum(caches.values())

    def fits(self, caches: Mapping[str, int]) -> bool:
        return self.whole(caches) <= self.nbytes

    def cost(self, caches: Mapping[str, int]) -> tuple[bool, int]:
        return not self.fits(caches), self.moved(caches)[0]

    def moved(self, caches: Mapping[str, int]) -> tuple[int, int]:
        if self.fits(caches):
            return 0, 0
        return _moved(_turns(self.ours, caches), self.nbytes - self.stays, chunk_of(self.ours))


def chunk_of(ours: Sequence[Demand]) -> int:
    return ours[0].chunk if ours else CHUNK_BYTES


# --- turns ---------------------------------------------------------------------------------


def _turns(ours: Sequence[Demand], caches: Mapping[str, int]) -> list[Turn]:
    """Return one turn for each stage, or for each part if parts take turns. The turn of a permanent
    stage has its KV cache alone."""
    found: list[Turn] = []
    for claim in ours:
        parts, cache = [p for p in claim.parts if not p.stays], caches[claim.name]
        together = [parts] if claim.at_once else [[p] for p in parts]
        found += [_turn(some, cache) for some in together if some or cache]
    return found


def _turn(parts: Sequence[WeightGroup], cache: int) -> Turn:
    by_layer = next((p for p in parts if p.layers), None)
    return Turn(
        taken=sum(p.taken for p in parts),
        copied=sum(p.copied for p in parts),
        cache=cache,
        layers=by_layer.layers if by_layer else 1,
        layer_taken=by_layer.layer_taken if by_layer else 0,
        layer_bytes=by_layer.layer_bytes if by_layer else 0,
    )


def _moved(turns: Sequence[Turn], room: int, chunk: int) -> tuple[int, int]:
    """Return the bytes of a round by layers, and by whole stages. A part larger than `room`
    streams."""
    streamed = sum(turn.copied for turn in turns if turn.taken > room)
    others = [turn for turn in turns if turn.taken <= room]
    by_layer = by_layer_bytes(others, room, chunk)
    return streamed + by_layer, streamed + whole_bytes(others, room)
