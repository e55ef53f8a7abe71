"""A stage's KV cache as scratch, leased with the weights, and its contents between two turns.

With `kv: drop` nothing is copied, and the cache is loaded as zeros. Otherwise the blocks of
requests in flight are saved, and with prefix caching every block ever written, because the
scheduler may hand it out again.

Contents that are gone but that the scheduler counts on are a loss. A scheduler of swapd gets the
number of the loss. For others `lost_blocks.py` tracks the lost blocks, and which of them each step
has read. Each of several ranks has a part of every block, so the losses of all ranks count.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from swapd.shared.text import counted
from swapd.shared.units import seconds
from swapd_client.errors import SwapdError
from swapd_client.lease import Lease
from swapd_client.log import log
from swapd_client.memory.component import Component
from swapd_client.vllm.ranks import LossCounts
from swapd_client.vllm.stage.lost_blocks import LostBlocks, RequestStep

#: The option `kv`.
Fate = Literal["private", "drop", "auto", "save"]

Blocks = Sequence[Iterable[int]]


class Busy(SwapdError, RuntimeError):
    """Requests are in flight, and the call would drop their cache."""


class CacheLost(SwapdError, RuntimeError):
    """A step would read lost contents of the cache, and the scheduler cannot learn of it."""


class Layer(NamedTuple):
    """One layer's share of a block: `stride` bytes at `offset + block * stride`."""

    offset: int
    stride: int


class BlocksInUse:
    """Blocks with contents, as the scheduler reports them. Pure."""

    def __init__(self, *, prefixes: bool) -> None:
        """`prefixes`: whether blocks of an ended request may be the prefix of another."""
        self._prefixes = prefixes
        #: The blocks of each request in order, by group of layers.
        self._of: dict[str, list[list[int]]] = {}
        self._left: set[int] = set()

    @property
    def blocks(self) -> list[int]:
        return sorted(self._left.union(*(group for one in self._of.values() for group in one)))

    def tables(self, request: str) -> Sequence[Sequence[int]]:
        return self._of.get(request, [])

    def has(self, request: str, blocks: Blocks) -> None:
        """A request has exactly these blocks, not those from before a preemption."""
        if self._prefixes:
            self._left.update(*self._of.get(request, []))
        self._of[request] = [list(group) for group in blocks]

    def gets(self, request: str, blocks: Blocks) -> None:
        for table, group in zip(self._of.get(request, []), blocks, strict=False):
            table.extend(group)

    def forget_prefixes(self) -> None:
        self._left.clear()

    def ended(self, requests: Iterable[str]) -> None:
        for request in requests:
            blocks = self._of.pop(request, [])
            if self._prefixes:
                self._left.update(*blocks)


def ranges_of(layers: Iterable[Layer], blocks: Sequence[int], nbytes: int) -> list[tuple[int, int]]:
    """Return the places, as (offset, bytes), of ascending blocks in a cache of `nbytes` bytes."""
    runs = list(_runs(blocks))
    ranges = []
    for offset, stride in layers:
        for first, last in runs:
            start = offset + first * stride
            ranges.append((start, min((last + 1 - first) * stride, nbytes - start)))
    return ranges


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    for _, run in groupby(enumerate(blocks), lambda placed: placed[1] - placed[0]):
        numbers = [block for _, block in run]
        yield numbers[0], numbers[-1]


class KvTerms(NamedTuple):
    fate: Fate
    #: Whether the scheduler keeps blocks of ended requests as prefixes of others.
    prefixes: bool
    layers: Sequence[Layer]
    #: Why the scheduler would not learn of a loss, with the remedy; "": it learns.
    unreported: str = ""
    slice_s: float | None = None
    #: Whether the scheduler learns of a loss by its number, as swapd's do, or by the lost blocks
    #: that a step has read, as vLLM's own.
    by_number: bool = True
    #: Tokens in a block, by group of layers.
    block_tokens: Sequence[int] = ()

    @property
    def saved(self) -> bool:
        return self.fate != "drop"

    def __str__(self) -> str:
        ends = "; a step that would read lost blocks ends the stage: to have them computed again, "
        lost = ends + self.unreported if self.unreported else ""
        if self.fate == "drop":
            return f"and is dropped after a turn, which lasts until no request is in flight{lost}"
        whole = self.fate == "save" or self.prefixes
        what = "all blocks" if whole else "blocks of requests in flight"
        turns = "" if self.slice_s is None else f"; a turn lasts {seconds(self.slice_s)}"
        return f"and {what} are saved{turns}{lost}"


class StageCache:
    def __init__(self, component: Component, terms: KvTerms, counts: LossCounts) -> None:
        self.component = component
        self.terms = terms
        self.counts = counts
        self.in_use = BlocksInUse(prefixes=terms.prefixes or terms.fate == "save")
        #: Number of losses of this rank.
        self.losses = 0
        self._void = False
        self._lost_blocks = LostBlocks()
        #: Whether only this process can lose contents, and the scheduler gets the number.
        self.counts_alone = counts.ranks == 1 and terms.by_number
        #: Number of losses of all ranks that `take_in_losses` has taken in.
        self._known_loss = 0

    @property
    def name(self) -> str:
        return self.component.name

    def discard(self) -> None:
        """Mark the contents as void, so that `leave` saves nothing."""
        self._void = True

    def leave(self) -> None:
        """Tell which contents to save, at the end of a turn, under the lease."""
        if self.terms.saved:
            nbytes = self.component.nbytes
            blocks = [] if self._void else self.in_use.blocks
            self.component.used(ranges_of(self.terms.layers, blocks, nbytes))

    def come(self, lease: Lease) -> None:
        if lease.fresh(self.name) or self._void:
            self._begin_anew()

    def go_alone(self) -> None:
        """The daemon is gone, and no lease was held: contents that were not saved are zeros."""
        if not self.terms.saved or self.component.lost or self._void:
            self._begin_anew()

    def _begin_anew(self) -> None:
        void, self._void = self._void, False
        blocks = self.in_use.blocks
        if not blocks:
            return
        self.losses += 1
        if not self.terms.by_number:
            self._lost_blocks.lose(blocks)
        self.in_use.forget_prefixes()
        if self.terms.saved and not void:
            log.warning(
                "%d blocks of %s are gone, because swapd could not save them: the contents "
                "%s. swapd's log has the reason",
                len(blocks),
                self.name,
                "are needed, so the stage ends" if self.terms.unreported else "are computed again",
            )

    def count_doubtful(self) -> int:
        """Count results that may be wrong as a loss; return its number. From any thread."""
        self.losses += 1
        self.publish_losses()
        return self.counts.total

    def publish_losses(self) -> None:
        """Before a step, under its lease."""
        self.counts.set(self.losses)

    def take_in_losses(self) -> None:
        """Note the losses of other ranks, after the step's blocks are noted and before `read`."""
        if self._known_loss < (losses := self.counts.total):
            self._known_loss = losses
            self._lost_blocks.lose(self.in_use.blocks)  # also the new blocks: no step has read them
            self.in_use.forget_prefixes()

    def tables(self, request: str) -> list[tuple[Sequence[int], int]]:
        return list(zip(self.in_use.tables(request), self.terms.block_tokens, strict=False))

    def read(self, shares: Iterable[RequestStep]) -> set[int]:
        """Return the lost blocks that a step will read. Before the step, under its lease.

        Raises: CacheLost if there are some, and the scheduler would not learn of it.
        """
        gone = self._lost_blocks.step(shares)
        if gone and self.terms.unreported:
            raise CacheLost(
                f"{self.name} has lost {counted(len(gone), 'block')}, which requests would read: "
                "start the stage again, because it would go on with zeros. swapd's log has the "
                f"reason. To have such requests computed again, {self.terms.unreported}"
            )
        return gone
