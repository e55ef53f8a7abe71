"""Chooses which components to keep on the device, to stream and to swap. Pure.

The treatment with the least wait for copies in a request wins, then the one that moves the fewest
bytes, then the simplest. The rules of the comparison:

- A kept component costs no wait, and occupies its bytes permanently.
- Alternating components share one place, as large as the largest of them. A request loads each
  once.
- A streamed component needs two slots of its largest block in that place while it runs. The
  remaining memory keeps blocks, first where a byte saves the most waiting. Keeping a block saves
  no waiting if computing hides its copy.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal, NamedTuple

import msgspec

from swapd.core.foresight import Candidate, victims
from swapd.shared.config import GPU_CHUNK
from swapd.shared.errors import UserError
from swapd.shared.units import size
from swapd.shared.vm import round_up

#: Requests to skip, until the start state is forgotten, and to count.
_WARM_UP = 3
_COUNTED = 12


def lru_bytes(sizes: Sequence[int], room: int, copied: Sequence[int] | None = None) -> int | None:
    """Return the bytes that a request moves if whole components are loaded, and the least recently
    used one is evicted. That is swapd without a plan.

    None if a component is larger than `room`. `copied`: the bytes of each load, if not its size.
    """
    if max(sizes) > room:
        return None
    there: dict[str, Candidate] = {}
    order = [Candidate(str(i), nbytes) for i, nbytes in enumerate(sizes)]
    moved, free = 0, room
    for request in range(_WARM_UP + _COUNTED):
        for one, load in zip(order, copied or sizes, strict=True):
            if one.name not in there:
                for victim in victims(one.chunks - free, there.values()) or ():
                    free += there.pop(victim.name).chunks
                free -= one.chunks
                moved += load if request >= _WARM_UP else 0
            there[one.name] = there.pop(one.name, one)
    return moved // _COUNTED


How = Literal["keep", "alternate", "stream"]
_WAYS: tuple[How, ...] = ("keep", "alternate", "stream")

#: Slots for streaming: one block computes while the next is copied.
SLOTS = 2

CHUNK_BYTES = GPU_CHUNK

#: Most components compared one by one; smaller ones share a treatment.
_WEIGHED = 8


class PlanError(UserError):
    """No plan is possible; the message gives the reason and advice."""


class DoesNotFit(PlanError):
    """No treatment makes the components fit; the message has the whole sum."""


class ModelComponent(msgspec.Struct, frozen=True):
    """Only a component with blocks can be streamed."""

    name: str
    nbytes: int
    blocks: int = 0
    block_bytes: int = 0  # of its largest block
    rest_bytes: int = 0  # in no block: they stay on the device while the blocks are streamed
    passes: int = 1  # over its weights, in a request
    compute_s: float | None = None  # of one pass; None if unknown

    def share(self, shards: int, pipeline: int) -> int:
        """Return the most bytes of one process. `shards` processes divide each part; `pipeline`
        processes divide the blocks, and one of them may have all the rest."""
        blocks = -(-self.blocks // pipeline) * self.block_bytes
        most = blocks + self.rest_bytes if self.blocks else -(-self.nbytes // pipeline)
        return min(self.nbytes, most) // shards if pipeline > 1 else self.nbytes // shards


class MemoryBudget(msgspec.Struct, frozen=True):
    total: int
    kv_cache: int = 0
    activations: int = 0
    overhead: int = 0

    @property
    def room(self) -> int:
        return self.total - self.kv_cache - self.activations - self.overhead

    def __str__(self) -> str:
        parts = {
            "KV cache": self.kv_cache,
            "activations": self.activations,
            "overhead": self.overhead,
        }
        less = "".join(f" - {size(n)} {what}" for what, n in parts.items() if n)
        left = size(self.room) if self.room > 0 else "nothing"
        return f"{size(self.total)}{less} leaves {left} for weights"


class Treatment(msgspec.Struct, frozen=True):
    name: str
    how: How
    nbytes: int
    kept_bytes: int
    swap_in_s: float  # to copy all that is not kept
    step_s: float  # of each pass, if it is streamed
    request_s: float
    moved_bytes: int  # in a request
    passes: int = 1
    #: Whether the compute time is known; if not, copies are assumed to overlap nothing.
    compute_known: bool = False


class Advice(msgspec.Struct, frozen=True):
    memory: MemoryBudget
    bytes_per_s: float
    placements: tuple[Treatment, ...]
    #: Kept bytes, and the shared place of the other components.
    budget_bytes: int
    request_s: float
    moved_bytes: int
    #: None if a component is too large for LRU.
    lru_bytes: int | None = None

    def treated(self, how: How) -> list[Treatment]:
        return [p for p in self.placements if p.how == how]


def advise(
    components: Sequence[ModelComponent],
    memory: MemoryBudget,
    bytes_per_s: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> Advice:
    """Return the best treatment of `components`, at least one. Raises: DoesNotFit."""
    given = [grouped(c, chunk_bytes) for c in components]
    for small in _WAYS[:2]:
        best: Advice | None = None
        for ways in product(*_ways(given, small)):
            found = _place(given, ways, memory, bytes_per_s, chunk_bytes)
            if found is not None and (best is None or _rank(found) < _rank(best)):
                best = found
        if best is not None:
            by_lru = lru_bytes([c.nbytes for c in components], memory.room)
            return msgspec.structs.replace(best, lru_bytes=by_lru)
    raise DoesNotFit(_too_much(given, memory, chunk_bytes))


def grouped(c: ModelComponent, chunk_bytes: int = CHUNK_BYTES) -> ModelComponent:
    """Merge blocks that are smaller than a chunk, as they are streamed in groups."""
    if c.blocks < 2 or c.block_bytes >= chunk_bytes:
        return c
    together = -(-chunk_bytes // c.block_bytes)
    blocks = -(-c.blocks // together)
    return msgspec.structs.replace(c, blocks=blocks, block_bytes=together * c.block_bytes)


def _rank(advice: Advice) -> tuple[float, int, int]:
    odd = sum(_WAYS.index(p.how) for p in advice.placements)
    return round(advice.request_s, 9), advice.moved_bytes, odd


def _ways(components: Sequence[ModelComponent], small: How) -> Iterable[tuple[How, ...]]:
    weighed = sorted(components, key=lambda c: c.nbytes)[-_WEIGHED:]
    for c in components:
        if c not in weighed:
            yield (small,)
        else:
            yield _WAYS if c.blocks > 1 else _WAYS[:2]


def _place(
    components: Sequence[ModelComponent],
    ways: Sequence[How],
    memory: MemoryBudget,
    bytes_per_s: float,
    chunk_bytes: int,
) -> Advice | None:
    treated = list(zip(components, ways, strict=True))
    streamed = [c for c, how in treated if how == "stream"]
    taken = sum(_staying(c, how, chunk_bytes) for c, how in treated)
    taken += max((_in_turn(c, how, chunk_bytes) for c, how in treated), default=0)
    if taken > memory.room:
        return None
    kept = _blocks_kept(streamed, memory.room - taken, bytes_per_s, chunk_bytes)
    shares = {}
    for c, n in zip(streamed, kept, strict=True):
        taken += n * round_up(c.block_bytes, chunk_bytes)
        shares[c.name] = min(c.rest_bytes + n * c.block_bytes, c.nbytes)
    placements = tuple(_placement(c, how, shares.get(c.name, 0), bytes_per_s) for c, how in treated)
    request_s = sum(p.request_s for p in placements)
    moved = sum(p.moved_bytes for p in placements)
    return Advice(memory, bytes_per_s, placements, taken, request_s, moved)


def _staying(c: ModelComponent, how: How, chunk_bytes: int) -> int:
    nbytes = {"keep": c.nbytes, "stream": c.rest_bytes, "alternate": 0}[how]
    return round_up(nbytes, chunk_bytes)


def _in_turn(c: ModelComponent, how: How, chunk_bytes: int) -> int:
    if how == "keep":
        return 0
    if how == "alternate":
        return round_up(c.nbytes, chunk_bytes)
    return SLOTS * round_up(c.block_bytes, chunk_bytes)


class _Blocks(NamedTuple):
    name: str
    number: int
    taken: int
    #: Bytes that keeping a block saves: not waited for, not copied.
    waited: float
    copied: int


def _blocks_of(c: ModelComponent, bytes_per_s: float, chunk_bytes: int) -> Iterable[_Blocks]:
    """Yield groups of `c`'s blocks by the waiting that keeping one block saves, the most first."""
    taken, copied = round_up(c.block_bytes, chunk_bytes), c.passes * c.block_bytes
    most = c.blocks - SLOTS
    waited = max(0.0, c.nbytes - c.rest_bytes - (c.compute_s or 0.0) * bytes_per_s)
    whole, part = divmod(waited, c.block_bytes)
    numbers = min(int(whole), most), min(int(whole) + 1, most)
    yield _Blocks(c.name, numbers[0], taken, copied, copied)
    yield _Blocks(c.name, numbers[1] - numbers[0], taken, c.passes * part, copied)
    yield _Blocks(c.name, most - numbers[1], taken, 0.0, copied)


def _blocks_kept(
    streamed: Sequence[ModelComponent], left: int, bytes_per_s: float, chunk_bytes: int
) -> list[int]:
    """Return how many blocks of each component to keep in `left` bytes.

    First come the blocks that save the most waiting for their size, then those that save the most
    copying, so that more memory is never worse.
    """
    kept = dict.fromkeys((c.name for c in streamed), 0)
    found = [blocks for c in streamed for blocks in _blocks_of(c, bytes_per_s, chunk_bytes)]
    for blocks in sorted(found, key=lambda b: (-b.waited / b.taken, -b.copied / b.taken)):
        fitting = min(left // blocks.taken, blocks.number)
        kept[blocks.name] += fitting
        left -= fitting * blocks.taken
    return [kept[c.name] for c in streamed]


def _placement(c: ModelComponent, how: How, share: int, bytes_per_s: float) -> Treatment:
    kept, step_s = c.nbytes if how == "keep" else share, 0.0
    absent_s = (c.nbytes - kept) / bytes_per_s
    request_s, moved = absent_s, c.nbytes - kept
    if how == "stream":
        # copies overlap computing, but for that of the first block, which is neglected
        step_s = max(0.0, absent_s - (c.compute_s or 0.0))
        request_s, moved = c.passes * step_s, c.passes * moved
    return Treatment(
        name=c.name,
        how=how,
        nbytes=c.nbytes,
        kept_bytes=kept,
        swap_in_s=absent_s,
        step_s=step_s,
        request_s=request_s,
        moved_bytes=moved,
        passes=c.passes,
        compute_known=c.compute_s is not None,
    )


def _too_much(components: Sequence[ModelComponent], memory: MemoryBudget, chunk_bytes: int) -> str:
    if memory.room <= 0:
        return f"{memory}: give it less KV cache, or a larger device"
    least = {
        c.name: _in_turn(c, "stream" if c.blocks > 1 else "alternate", chunk_bytes)
        for c in components
    }
    most = max(components, key=lambda c: least[c.name])
    if most.blocks > 1:
        terms = [f"{SLOTS} blocks of {most.name} ({size(least[most.name])})"]
        instead = "quantised weights, less KV cache, or a larger device"
    else:
        terms = [f"{most.name} whole ({size(most.nbytes)})"]
        instead = (
            f"streaming {most.name} (--blocks {most.name}=N, if it has any), or another device"
        )
    rests = {c.name: c.rest_bytes for c in components if c.blocks > 1 and c.rest_bytes}
    terms += [f"the part of {name} in no block ({size(n)})" for name, n in rests.items()]
    total = least[most.name] + sum(round_up(n, chunk_bytes) for n in rests.values())
    return f"{memory}, and {' + '.join(terms)} = {size(total)} must fit there. It takes {instead}"
