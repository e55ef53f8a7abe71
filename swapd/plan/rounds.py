"""The bytes that a round of turns moves: each stage has one turn, in a fixed order. Pure.

A turn needs all weights of its stage, and its KV cache. A cache is never copied, so only weights
move.
"""

from bisect import bisect
from collections.abc import Callable, Sequence

import msgspec

from swapd.plan import stall
from swapd.plan.advise import CHUNK_BYTES


class Turn(msgspec.Struct, frozen=True):
    """The memory of one stage's turn, without permanent components. Bytes."""

    #: Weights: their size in an arena, and the bytes that loading all of them copies.
    taken: int
    copied: int
    #: Size of its KV cache in an arena.
    cache: int = 0
    #: Decoder layers, one layer's size in an arena, and its copied bytes. Default: one layer.
    layers: int = 1
    layer_taken: int = 0
    layer_bytes: int = 0


def whole_bytes(turns: Sequence[Turn], room: int) -> int:
    """Bytes of a round in which whole stages come and go, the least recently used first."""
    if not turns:
        return 0
    sizes = [turn.taken + turn.cache for turn in turns]
    return stall.lru_bytes(sizes, room, [turn.copied for turn in turns]) or 0


def by_layer_bytes(turns: Sequence[Turn], room: int, chunk: int = CHUNK_BYTES) -> int:
    """Bytes of a round in which the same layers leave each time, and no more than necessary.

    `room` is at least the need of each turn. If the stages exceed it by some bytes, the result is
    at most twice that, and a layer of each stage; and never more than `whole_bytes`.
    """
    kept = kept_bytes(turns, room, chunk)
    moved = sum(_leaving(turn, n) for turn, n in zip(turns, kept, strict=True))
    return min(moved, whole_bytes(turns, room))


def _leaving(turn: Turn, kept: int) -> int:
    """Bytes to copy again if `kept` stay: whole layers, and the remainder last."""
    layers = -(-(turn.taken - kept) // (turn.layer_taken or turn.taken or 1))
    if layers > turn.layers or not turn.layer_bytes:
        return turn.copied if layers else 0
    return min(turn.copied, layers * turn.layer_bytes)


def kept_bytes(turns: Sequence[Turn], room: int, chunk: int = CHUNK_BYTES) -> list[int]:
    """Bytes of each stage that are never evicted, with the largest possible total.

    In each turn the kept bytes of the other stages share `room` with the whole turn: so the total
    is at most the rest of `room`, plus the turn's own kept bytes. In whole chunks of `chunk` bytes.
    """
    spare = [room - turn.taken - turn.cache for turn in turns]
    most = [turn.taken for turn in turns]

    def least(total: int) -> list[int]:
        return [max(0, total - beside) for beside in spare]

    def possible(total: int) -> bool:
        own = least(total)
        return sum(own) <= total and all(n <= top for n, top in zip(own, most, strict=True))

    total = largest(sum(most) // chunk, lambda n: possible(n * chunk)) * chunk
    kept = least(total)
    left = total - sum(kept)
    for number in sorted(range(len(turns)), key=lambda n: turns[n].taken):  # small stages first
        more = min(left, most[number] - kept[number])
        kept[number] += more
        left -= more
    return kept


def largest(most: int, possible: Callable[[int], bool]) -> int:
    """The largest number up to `most` that is possible; 0 is. If one is not, no larger one is."""
    return bisect(range(1, most + 1), False, key=lambda n: not possible(n))
