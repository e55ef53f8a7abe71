"""What a round of turns moves: each stage is used once, one after the other. Pure.

A turn needs all weights of its stage, and its KV cache. A cache comes in empty and goes without
being copied, so only weights are moved.
"""

from collections.abc import Sequence

import msgspec

from swapd.plan import stall
from swapd.plan.advise import CHUNK_BYTES


class Turn(msgspec.Struct, frozen=True):
    """What one stage needs at once, beside what stays. Bytes."""

    #: Weights: what they take of an arena, and what is copied when all of them come in.
    taken: int
    copied: int
    #: What its KV cache takes of an arena.
    cache: int = 0
    #: Decoder layers, what one of them takes, and what is copied. A stage without is one layer.
    layers: int = 1
    layer_taken: int = 0
    layer_bytes: int = 0


def whole_bytes(turns: Sequence[Turn], room: int) -> int:
    """Bytes of a round in which stages come and go as wholes, the least recently used first."""
    if not turns:
        return 0
    sizes = [turn.taken + turn.cache for turn in turns]
    return stall.lru_bytes(sizes, room, [turn.copied for turn in turns]) or 0


def by_layer_bytes(turns: Sequence[Turn], room: int, chunk: int = CHUNK_BYTES) -> int:
    """Bytes of a round in which the same layers leave each time, and no more than have to.

    `room` is at least as much as each turn needs. Of stages that do not fit by so much, it is at
    most twice that, and a layer of each stage; and never more than `whole_bytes`.
    """
    kept = kept_bytes(turns, room, chunk)
    moved = sum(_leaving(turn, n) for turn, n in zip(turns, kept, strict=True))
    return min(moved, whole_bytes(turns, room))


def _leaving(turn: Turn, kept: int) -> int:
    """Bytes to copy again when so much stays: of whole layers, and of the rest last."""
    layers = -(-(turn.taken - kept) // (turn.layer_taken or turn.taken or 1))
    if layers > turn.layers or not turn.layer_bytes:
        return turn.copied if layers else 0
    return min(turn.copied, layers * turn.layer_bytes)


def kept_bytes(turns: Sequence[Turn], room: int, chunk: int = CHUNK_BYTES) -> list[int]:
    """What of each stage is never taken away, as much in all as can be.

    What the others keep is beside each turn: all of them together keep at most what a turn leaves
    of `room`, and what its own stage keeps. In whole chunks of `chunk` bytes.
    """
    spare = [room - turn.taken - turn.cache for turn in turns]
    most = [turn.taken for turn in turns]

    def least(total: int) -> list[int]:
        return [max(0, total - beside) for beside in spare]

    def possible(total: int) -> bool:
        own = least(total)
        return sum(own) <= total and all(n <= top for n, top in zip(own, most, strict=True))

    low, high = 0, sum(most) // chunk
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if possible(middle * chunk) else (low, middle - 1)
    kept = least(low * chunk)
    left = low * chunk - sum(kept)
    for number in sorted(range(len(turns)), key=lambda n: turns[n].taken):  # small stages first
        more = min(left, most[number] - kept[number])
        kept[number] += more
        left -= more
    return kept
