"""The memory that a process of a stage demands of its GPU, and the cost of streaming. Pure."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from swapd.plan import kv
from swapd.plan.advice import CHUNK_BYTES
from swapd.plan.omni import Kind
from swapd.shared.units import size
from swapd.shared.vm import round_up
from swapd_client.vllm.options import Options
from swapd_client.vllm.window_size import number_of, slots_of


class WeightGroup(msgspec.Struct, frozen=True):
    """Weights that load and leave as one, or block by block. In bytes."""

    name: str
    nbytes: int
    #: Bytes needed on the device during use.
    least: int
    stays: bool = False
    #: Size in an arena if they load by block: each block has its own chunks.
    by_block: int = 0
    #: Groups of decoder layers that leave one by one, each with its own chunks; bytes of a group.
    layers: int = 0
    layer_bytes: int = 0
    #: Single decoder layers, and bytes of one; how many stream, and how many of these are on the
    #: device at a time.
    each: int = 0
    each_bytes: int = 0
    streamed: int = 0
    slots: int = 0
    chunk: int = CHUNK_BYTES

    @property
    def taken(self) -> int:
        if self.streamed:
            return self.taken_with(self.each - self.streamed + self.slots)
        rest = round_up(self.nbytes - self.layers * self.layer_bytes, self.chunk)
        return self.by_block or self.layers * self.layer_taken + rest

    def taken_with(self, layers: int) -> int:
        rest = round_up(self.nbytes - self.each * self.each_bytes, self.chunk)
        return rest + layers * round_up(self.each_bytes, self.chunk)

    def streaming(self, options: Options, room: int) -> "WeightGroup":
        """Return this group with layers streamed by `options`, in `room` bytes of an arena.

        Raises: InvalidArgument.
        """
        layers, nbytes = self.each, self.each_bytes
        room_for = (room - self.taken_with(0)) // round_up(nbytes, self.chunk)
        beside = self.nbytes - layers * nbytes
        number = number_of(options, self.name, layers, nbytes, beside, room_for)
        slots = slots_of(number, layers, room_for)
        if number <= slots:
            return self
        return replace(self, layers=0, streamed=number, slots=slots)

    @property
    def copied(self) -> int:
        """Bytes loaded for a turn, before each step loads the streamed layers again."""
        return self.nbytes - (self.streamed - self.slots) * self.each_bytes

    @property
    def layer_taken(self) -> int:
        return round_up(self.layer_bytes, self.chunk)

    @property
    def at_least(self) -> int:
        return self.taken if self.layers or self.streamed else round_up(self.least, self.chunk)


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    stage_id: int
    kind: Kind
    ours: bool
    parts: tuple[WeightGroup, ...]
    #: Whether a step needs all parts at once.
    at_once: bool = True
    #: Memory outside the arena; without swapd, all its memory.
    room: int
    #: Least size of its KV cache, 0 without one; largest useful size, and layout, if known.
    least_cache: int = 0
    most_cache: int | None = None
    cache: kv.KvCache | None = None
    #: Whether a setting fixes the cache's size.
    said: bool = False
    graphs: bool = False
    #: Whether it runs without graphs, so that its layers can stream.
    eager: bool = False

    @property
    def weights(self) -> int:
        return sum(p.nbytes for p in self.parts)

    @property
    def chunk(self) -> int:
        return self.parts[0].chunk if self.parts else CHUNK_BYTES

    def cache_bytes(self, most: int = 0) -> int:
        """Return its KV cache in chunks: `most` bytes if useful, and at least `least_cache`."""
        least = round_up(self.least_cache, self.chunk)
        if self.said or not least:
            return least
        useful = most if self.most_cache is None else round_up(self.most_cache, self.chunk)
        return max(least, min(most, useful))

    @property
    def staying(self) -> int:
        return sum(p.taken for p in self.parts if p.stays)

    @property
    def streams(self) -> WeightGroup | None:
        turn = [p for p in self.parts if p.each and not p.stays]
        return turn[0] if turn and self.kind == "ar" else None

    def streaming(self, room: int) -> "Demand":
        part = self.streams
        assert part is not None
        beside = self.turning(0) - part.at_least
        own = part.streaming(Options(resident="auto"), room - beside)
        return replace(self, parts=tuple(own if p is part else p for p in self.parts))

    def turning(self, cache: int) -> int:
        needs = [p.at_least for p in self.parts if not p.stays]
        return (sum(needs) if self.at_once else max(needs, default=0)) + cache


class GpuFacts(NamedTuple):
    """A GPU with its bytes of memory. `overhead` (in place of the estimate for contexts and graphs)
    and `budget` (of the arena): if the user gives them."""

    gpu: int
    total: int
    bytes_per_s: float
    overhead: int | None = None
    budget: int | None = None


class Term(msgspec.Struct, frozen=True):
    nbytes: int
    what: str

    def __str__(self) -> str:
        return f"{size(self.nbytes)} {self.what}"


What = Literal["fastest", "balanced", "least memory"]


#: Bandwidth of the GPU's own memory in an estimate: an L4 has 0.3 TB/s, an H200 4.8 (NVIDIA's data
#: sheets).
READ_BYTES_PER_S = 1e12


class StreamPoint(msgspec.Struct, frozen=True):
    name: str
    what: What
    layers: int
    streamed: int
    slots: int
    turn_bytes: int
    #: Bytes that stay, without the window: the setting `resident`.
    resident_bytes: int
    step_bytes: int
    #: Estimate for one request: the longer of these copies and of the compute, which reads all
    #: weights once from the memory of the GPU.
    step_s: float
    #: Largest KV cache beside it, and its tokens, if known.
    cache_bytes: int
    cache_tokens: int


def points(claim: Demand, room: int, bytes_per_s: float) -> Iterator[StreamPoint]:
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
            step_s=max(number * part.each_bytes / bytes_per_s, part.nbytes / READ_BYTES_PER_S),
            cache_bytes=cache,
            cache_tokens=kv.tokens_in(claim.cache, cache) if claim.cache else 0,
        )
