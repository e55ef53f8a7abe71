"""Records which KV cache blocks lost their contents, so that no step counts that read one. Pure.

A block is valid again as far as it was rewritten from its first slot on. A request that has read
lost contents writes invalid contents, which count as lost too.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

#: vLLM's null block, which stands for a missing block of a request.
NOBODYS = 0


class RequestStep(NamedTuple):
    """A request's share of a step: it reads `computed` tokens, then writes `scheduled` ones."""

    request: str
    #: Its blocks in order, and the tokens in a block, by group of layers.
    tables: Sequence[tuple[Sequence[int], int]]
    computed: int
    scheduled: int
    #: Whether it has other blocks than in its last step.
    anew: bool


class LostBlocks:
    def __init__(self) -> None:
        #: Number of valid slots, from the first on, of each block with invalid ones.
        self._whole: dict[int, int] = {}
        #: Requests that read nothing lost in the last step, and so read nothing lost in the next.
        self._sound: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._whole)

    def lose(self, blocks: Iterable[int]) -> None:
        self._whole.update(dict.fromkeys(blocks, 0))
        self._whole.pop(NOBODYS, None)
        self._sound.clear()

    def step(self, shares: Iterable[RequestStep]) -> set[int]:
        """Note a step of these shares, in this order; return the lost blocks that it reads."""
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

    def _not_whole(self, share: RequestStep) -> list[int]:
        return [
            block
            for table, size in share.tables
            for block, _, slots in _spans(table, size, 0, share.computed)
            if self._whole.get(block, slots) < slots
        ]

    def _write(self, share: RequestStep, *, of_use: bool) -> None:
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
    """Yield the places of the tokens from `start` to `end`: block, first slot, last slot + 1."""
    for number in range(start // size, min(-(-end // size), len(table))):
        at = number * size
        if table[number] != NOBODYS:
            yield table[number], max(start - at, 0), min(end - at, size)
