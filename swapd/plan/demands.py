"""The memory that one process of a stage of vLLM-Omni demands of its GPU. Pure."""

import msgspec

from swapd.plan import kv
from swapd.plan.advise import CHUNK_BYTES, in_chunks
from swapd.plan.omni import Kind
from swapd.shared.units import size


class WeightGroup(msgspec.Struct, frozen=True):
    """Weights that load and leave as one, or block by block. Bytes."""

    name: str
    nbytes: int
    #: The bytes that must be on the device during use.
    least: int
    stays: bool = False
    #: Their size in an arena if they load by block: each block has its own chunks. Else 0.
    by_block: int = 0
    #: Groups of decoder layers that leave one by one, each with its own chunks; bytes of one.
    layers: int = 0
    layer_bytes: int = 0
    #: The daemon's chunk size.
    chunk: int = CHUNK_BYTES

    @property
    def taken(self) -> int:
        rest = in_chunks(self.nbytes - self.layers * self.layer_bytes, self.chunk)
        return self.by_block or self.layers * self.layer_taken + rest

    @property
    def layer_taken(self) -> int:
        return in_chunks(self.layer_bytes, self.chunk)

    @property
    def at_least(self) -> int:
        """Their size in an arena during use."""
        return self.taken if self.layers else in_chunks(self.least, self.chunk)


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The need of one process of a stage on its GPU. Bytes."""

    name: str
    stage_id: int
    kind: Kind
    ours: bool
    parts: tuple[WeightGroup, ...]
    #: Whether a step needs all parts; else it needs one after the other.
    at_once: bool = True
    #: Memory outside the arena; without swapd, all its memory.
    room: int
    #: The least size of its KV cache, 0 without one; the largest of use, and its layout, if known.
    least_cache: int = 0
    most_cache: int | None = None
    cache: kv.KvCache | None = None
    #: Whether a setting fixes the cache's size, so that it gets no more.
    said: bool = False
    graphs: bool = False

    @property
    def weights(self) -> int:
        return sum(p.nbytes for p in self.parts)

    @property
    def chunk(self) -> int:
        """The daemon's chunk size."""
        return self.parts[0].chunk if self.parts else CHUNK_BYTES

    def cache_bytes(self, most: int = 0) -> int:
        """Its KV cache in whole chunks: `most` bytes if that is of use, and at least its least."""
        least = in_chunks(self.least_cache, self.chunk)
        if self.said or not least:
            return least
        useful = most if self.most_cache is None else in_chunks(self.most_cache, self.chunk)
        return max(least, min(most, useful))

    @property
    def staying(self) -> int:
        """Bytes of it that never leave the arena."""
        return sum(p.taken for p in self.parts if p.stays)

    def turning(self, cache: int) -> int:
        """Bytes of a step without the permanent components, with a KV cache of `cache` bytes."""
        needs = [p.at_least for p in self.parts if not p.stays]
        return (sum(needs) if self.at_once else max(needs, default=0)) + cache


class Term(msgspec.Struct, frozen=True):
    """One term of the sum."""

    nbytes: int
    what: str

    def __str__(self) -> str:
        return f"{size(self.nbytes)} {self.what}"
