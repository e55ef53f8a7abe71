"""What of a KV cache is gone, and who would read it: known block by block, so that no step counts
that has read from a block whose contents were lost. Pure.

A block is whole again as far as it was written anew from its first slot. What a request writes that
has read something gone is itself worth nothing, and is gone too.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

#: What vLLM calls the null block: it stands where a request has none, and is nobody's.
NOBODYS = 0


class Share(NamedTuple):
    """What a request has of a step: it reads `computed` tokens, writes `scheduled` after them."""

    request: str
    #: By group of layers: its blocks in order, and how many tokens a block holds.
    tables: Sequence[tuple[Sequence[int], int]]
    computed: int
    scheduled: int
    #: Whether it has other blocks than in the last step it was in.
    anew: bool


class Gone:
    """Of one cache."""

    def __init__(self) -> None:
        #: By block that is not whole: how many of its slots are, from the first on.
        self._whole: dict[int, int] = {}
        #: Requests that read nothing gone in the last step, and so will not in the next.
        self._sound: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._whole)

    def lose(self, blocks: Iterable[int]) -> None:
        """The contents of these are gone."""
        self._whole.update(dict.fromkeys(blocks, 0))
        self._whole.pop(NOBODYS, None)
        self._sound.clear()

    def step(self, shares: Iterable[Share]) -> set[int]:
        """A step is made, for these in this order; returns the blocks read in it that are gone."""
        if not self._whole:
            return set()
        gone: set[int] = set()
        sound: set[str] = set()
        for share in shares:
            known = share.request in self._sound and not share.anew
            read = [] if known else self._not_whole(share)
            gone.update(read)
            self._write(share, of_use=not read)
            if not read:
                sound.add(share.request)
        self._sound = set() if gone else sound
        return gone

    def _not_whole(self, share: Share) -> list[int]:
        return [
            block
            for table, size in share.tables
            for block, _, slots in _spans(table, size, 0, share.computed)
            if self._whole.get(block, slots) < slots
        ]

    def _write(self, share: Share, *, of_use: bool) -> None:
        end = share.computed + share.scheduled
        for table, size in share.tables:
            for block, first, last in _spans(table, size, share.computed, end):
                whole = self._whole.get(block, size)
                if not of_use:
                    self._whole[block] = min(whole, first)
                elif first <= whole < last:
                    self._whole[block] = last
                if self._whole.get(block) == size:
                    del self._whole[block]


def _spans(table: Sequence[int], size: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Where tokens from `start` to `end` are, as (block, first slot, last slot + 1)."""
    for number in range(start // size, min(-(-end // size), len(table))):
        at = number * size
        if table[number] != NOBODYS:
            yield table[number], max(start - at, 0), min(end - at, size)
