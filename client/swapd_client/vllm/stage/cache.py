"""A stage's KV cache as scratch: leased with the weights, and what becomes of it between two turns.

Lives here: which blocks hold something that somebody may read again, and where they are. How vLLM
makes its cache over a buffer of swapd's is said by `kv.py`. Does not import vLLM.

A turn may end with requests in flight, whose blocks are then saved; so is every block that was ever
written, if prefixes are cached, for the scheduler goes on to hand them out. Else the cache is
dropped: nothing is copied, and it comes in as zeros. Whatever is gone that the scheduler counts on
is a loss. A scheduler of swapd's is told its number; for another one it is known which blocks are
gone (`gone.py`), and said of each step which of them it read. How that is said is in
`scheduler.py`.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Literal, NamedTuple

from swapd.shared.units import seconds
from swapd_client.client import Client
from swapd_client.errors import SwapdError
from swapd_client.lease import Lease
from swapd_client.memory.component import Component
from swapd_client.vllm.stage.gone import Gone, Share

log = logging.getLogger("swapd_client")

#: What becomes of a stage's cache between two turns. "private": it takes no turns at all.
Fate = Literal["private", "drop", "auto", "save"]

#: Of one request: its blocks, by group of layers.
Blocks = Sequence[Iterable[int]]


class Busy(SwapdError, RuntimeError):
    """Requests are in flight, and what is asked for would take their cache from them."""


class CacheLost(SwapdError, RuntimeError):
    """What a step would read is gone from the cache, and the scheduler cannot be told."""


class Hears(Enum):
    """How a stage's scheduler hears of a loss."""

    #: It is one of swapd's: by the loss's number.
    BY_NUMBER = 1
    #: It is vLLM's own: by the blocks that a step read and that are gone.
    BY_BLOCKS = 2


class Layer(NamedTuple):
    """Where one layer's share of a block is: at `offset + block * stride`, and not more. Bytes."""

    offset: int
    stride: int


class InUse:
    """Which blocks hold something, as the scheduler's words say. Pure."""

    def __init__(self, *, prefixes: bool) -> None:
        """`prefixes`: whether what a request leaves behind may be another's beginning."""
        self._prefixes = prefixes
        #: By request: its blocks in order, by group of layers.
        self._of: dict[str, list[list[int]]] = {}
        #: Of requests that have ended.
        self._left: set[int] = set()

    @property
    def blocks(self) -> list[int]:
        """All of them, ascending."""
        return sorted(self._left.union(*(group for one in self._of.values() for group in one)))

    def tables(self, request: str) -> Sequence[Sequence[int]]:
        """The blocks of a request in order, by group of layers."""
        return self._of.get(request, [])

    def has(self, request: str, blocks: Blocks) -> None:
        """A request has these, and no others; what it had before it was preempted it leaves."""
        if self._prefixes:
            self._left.update(*self._of.get(request, []))
        self._of[request] = [list(group) for group in blocks]

    def gets(self, request: str, blocks: Blocks) -> None:
        """A request has these as well."""
        for table, group in zip(self._of.get(request, []), blocks, strict=False):
            table.extend(group)

    def forget_prefixes(self) -> None:
        """Nobody reads what requests have left behind."""
        self._left.clear()

    def ended(self, requests: Iterable[str]) -> None:
        for request in requests:
            blocks = self._of.pop(request, [])
            if self._prefixes:
                self._left.update(*blocks)


def ranges_of(layers: Iterable[Layer], blocks: Sequence[int], nbytes: int) -> list[tuple[int, int]]:
    """Where these blocks (ascending) are in a cache of `nbytes` bytes, as (offset, bytes)."""
    runs = list(_runs(blocks))
    ranges = []
    for offset, stride in layers:
        for first, last in runs:
            start = offset + first * stride
            ranges.append((start, min((last + 1 - first) * stride, nbytes - start)))
    return ranges


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours among them, as (first, last)."""
    first = last = None
    for block in blocks:
        if last is not None and first is not None and block != last + 1:
            yield first, last
            first = None
        first, last = block if first is None else first, block
    if first is not None and last is not None:
        yield first, last


class Terms(NamedTuple):
    """What becomes of a cache between two turns, and why."""

    fate: Fate
    #: Whether the scheduler keeps what requests leave behind, for others that begin alike.
    prefixes: bool
    layers: Sequence[Layer]
    #: Why the scheduler would not hear of a loss, and what to set; "": it hears.
    deaf: str = ""
    #: How long a turn lasts if another stage waits, requests in flight or not; None: they finish.
    slice_s: float | None = None
    #: How the scheduler hears of a loss, if it does.
    hears: Hears = Hears.BY_NUMBER
    #: By group of layers, how many tokens a block holds.
    block_tokens: Sequence[int] = ()

    @property
    def saved(self) -> bool:
        """Whether there is somewhere to save it."""
        return self.fate != "drop"

    def __str__(self) -> str:
        if self.fate == "drop":
            return "is dropped, and has turns until no request is in flight"
        what = "what is" if self.fate == "save" or self.prefixes else "what requests in flight have"
        turns = "" if self.slice_s is None else f"; a turn lasts {seconds(self.slice_s)}"
        return f"and {what} in it is saved{turns}"


class Cache:
    """Of a stage, or of one of its ranks: its component, and what is to be saved of it."""

    def __init__(self, component: Component, terms: Terms) -> None:
        self.component = component
        self._terms = terms
        self.in_use = InUse(prefixes=terms.prefixes or terms.fate == "save")
        #: How often contents were lost that the scheduler counted on.
        self.losses = 0
        self._gone = Gone()

    @property
    def name(self) -> str:
        """As the daemon calls it."""
        return self.component.name

    def register_again(self, client: Client) -> None:
        """With another daemon, where it is; what is in it goes along, if it is ever saved."""
        self.component = client.register_scratch(
            self.name, self.component.tensor, mutable=self._terms.saved
        )

    def leave(self) -> None:
        """A turn ends: say what of it is worth saving. Under the lease."""
        if self._terms.saved:
            nbytes = self.component.nbytes
            self.component.used(ranges_of(self._terms.layers, self.in_use.blocks, nbytes))

    def come(self, lease: Lease) -> None:
        """A turn begins."""
        if lease.fresh(self.name):
            self._begin_anew()

    def go_alone(self) -> None:
        """The daemon is gone, and no lease was held: what was not saved is zeros."""
        if not self._terms.saved or self.component.lost:
            self._begin_anew()

    def _begin_anew(self) -> None:
        blocks = self.in_use.blocks
        if not blocks:
            return
        self.losses += 1
        if not self.hears_by_number:
            self._gone.lose(blocks)
        self.in_use.forget_prefixes()
        if self._terms.saved:
            log.warning(
                "%d blocks of %s are gone, for swapd could not save them: what requests in flight "
                "had there %s. swapd's log says why",
                len(blocks),
                self.name,
                "is needed, and ends the stage" if self._terms.deaf else "is computed again",
            )

    def doubt(self) -> int:
        """What was computed last may be wrong: that is a loss; its number. From any thread."""
        self.losses += 1
        return self.losses

    @property
    def hears_by_number(self) -> bool:
        """Whether the scheduler is told the number of a loss, and computes all again."""
        return not self._terms.deaf and self._terms.hears is Hears.BY_NUMBER

    def tables(self, request: str) -> list[tuple[Sequence[int], int]]:
        """As a `Share` has them."""
        return list(zip(self.in_use.tables(request), self._terms.block_tokens, strict=False))

    def read(self, shares: Iterable[Share]) -> set[int]:
        """Before a step, under its lease: the blocks that are read in it, and are gone.

        Raises: CacheLost if there are some, and the scheduler would not hear of it.
        """
        gone = self._gone.step(shares)
        if gone and self._terms.deaf:
            raise CacheLost(
                f"{len(gone)} blocks of {self.name} are gone, which requests would read: start the "
                "stage again, for it would go on with zeros. swapd's log says why they were not "
                f"saved. To have such requests computed again, {self._terms.deaf}"
            )
        return gone
