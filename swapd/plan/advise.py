"""Which components to keep on the device, which to stream, which to swap. Pure.

Every way of treating the components is weighed by what a request would wait for copies; the
least wait wins, then the fewest bytes moved, then the simplest. The rules behind the weighing:

- What is kept costs nothing, and its bytes for good.
- What alternates shares one place, as large as the largest of them, and is loaded once in a
  request.
- What is streamed needs two slots of its largest block while it runs, in that same place; what
  room is left keeps blocks of it, first where a byte of room saves most waiting. What computing
  hides saves none.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal, NamedTuple

import msgspec

from swapd.plan import stall
from swapd.shared.config import GPU_CHUNK
from swapd.shared.units import size

How = Literal["keep", "alternate", "stream"]
_WAYS: tuple[How, ...] = ("keep", "alternate", "stream")

#: Blocks that are streamed through: one computes, the next is copied.
SLOTS = 2

#: On a GPU: of what whole numbers are mapped, unless the daemon is told otherwise.
CHUNK_BYTES = GPU_CHUNK

#: More than so many are not weighed against each other: the smaller ones are treated alike.
_WEIGHED = 8


class PlanError(Exception):
    """No plan can be made of this; the message says why, and what to do."""


class DoesNotFit(PlanError):
    """No treatment makes these fit; the message spells the sum out."""


class Component(msgspec.Struct, frozen=True):
    """What there is to place. Without blocks it cannot be streamed."""

    name: str
    nbytes: int
    blocks: int = 0
    block_bytes: int = 0  # of its largest block
    rest_bytes: int = 0  # of what is in no block: stays in whenever the others are streamed
    passes: int = 1  # over its weights, in a request
    compute_s: float | None = None  # of one pass; None if nobody knows


class Memory(msgspec.Struct, frozen=True):
    """A device's memory, and what else has to fit there. Bytes."""

    total: int
    kv_cache: int = 0
    activations: int = 0
    overhead: int = 0

    @property
    def room(self) -> int:
        """What is left for weights; negative if the rest alone is too much."""
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


class Placement(msgspec.Struct, frozen=True):
    """What to do with one component, and what it costs. Seconds are of waiting for copies."""

    name: str
    how: How
    nbytes: int
    kept_bytes: int
    swap_in_s: float  # to copy in all of what is not kept
    step_s: float  # of each pass, if it is streamed
    request_s: float
    moved_bytes: int  # in a request
    passes: int = 1
    #: Whether computing was known; else nothing was taken to hide the copies.
    compute_known: bool = False


class Advice(msgspec.Struct, frozen=True):
    memory: Memory
    bytes_per_s: float
    placements: tuple[Placement, ...]
    #: What the daemon should own: all that is kept, and the place of what is not.
    budget_bytes: int
    #: What a request would move by LRU alone; None if something is too large for that.
    lru_bytes: int | None = None

    @property
    def request_s(self) -> float:
        return sum(p.request_s for p in self.placements)

    @property
    def moved_bytes(self) -> int:
        return sum(p.moved_bytes for p in self.placements)

    def treated(self, how: How) -> list[Placement]:
        return [p for p in self.placements if p.how == how]


def advise(
    components: Sequence[Component],
    memory: Memory,
    bytes_per_s: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> Advice:
    """The best treatment of `components`, of which there is one, copied in at `bytes_per_s`.

    Raises: DoesNotFit.
    """
    given = [grouped(c, chunk_bytes) for c in components]
    for small in _WAYS[:2]:
        best: Advice | None = None
        for ways in product(*_ways(given, small)):
            found = _place(given, ways, memory, bytes_per_s, chunk_bytes)
            if found is not None and (best is None or _rank(found) < _rank(best)):
                best = found
        if best is not None:
            by_lru = stall.lru_bytes([c.nbytes for c in components], memory.room)
            return msgspec.structs.replace(best, lru_bytes=by_lru)
    raise DoesNotFit(_too_much(given, memory, chunk_bytes))


def grouped(c: Component, chunk_bytes: int = CHUNK_BYTES) -> Component:
    """With blocks of at least a chunk: smaller ones are streamed in groups."""
    if c.blocks < 2 or c.block_bytes >= chunk_bytes:
        return c
    together = -(-chunk_bytes // c.block_bytes)
    blocks = -(-c.blocks // together)
    return msgspec.structs.replace(c, blocks=blocks, block_bytes=together * c.block_bytes)


def in_chunks(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """What `nbytes` take of a device, in whole chunks."""
    return -(-nbytes // chunk_bytes) * chunk_bytes


def _rank(advice: Advice) -> tuple[float, int, int]:
    odd = sum(_WAYS.index(p.how) for p in advice.placements)
    return round(advice.request_s, 9), advice.moved_bytes, odd


def _ways(components: Sequence[Component], small: How) -> Iterable[tuple[How, ...]]:
    """The ways to treat each; where they are many, the small ones as `small` says."""
    weighed = sorted(components, key=lambda c: c.nbytes)[-_WEIGHED:]
    for c in components:
        if c not in weighed:
            yield (small,)
        else:
            yield _WAYS if c.blocks > 1 else _WAYS[:2]


def _place(
    components: Sequence[Component],
    ways: Sequence[How],
    memory: Memory,
    bytes_per_s: float,
    chunk_bytes: int,
) -> Advice | None:
    """These ways, if there is room for them."""
    treated = list(zip(components, ways, strict=True))
    streamed = [c for c, how in treated if how == "stream"]
    taken = sum(in_chunks(c.nbytes, chunk_bytes) for c, how in treated if how == "keep")
    taken += sum(in_chunks(c.rest_bytes, chunk_bytes) for c in streamed)
    taken += max((_in_turn(c, how, chunk_bytes) for c, how in treated), default=0)
    if taken > memory.room:
        return None
    kept = _blocks_kept(streamed, memory.room - taken, bytes_per_s, chunk_bytes)
    taken += sum(
        n * in_chunks(c.block_bytes, chunk_bytes) for c, n in zip(streamed, kept, strict=True)
    )
    shares = {
        c.name: min(c.rest_bytes + n * c.block_bytes, c.nbytes)
        for c, n in zip(streamed, kept, strict=True)
    }
    placements = tuple(_placement(c, how, shares.get(c.name, 0), bytes_per_s) for c, how in treated)
    return Advice(memory, bytes_per_s, placements, taken)


def _in_turn(c: Component, how: How, chunk_bytes: int) -> int:
    """What it takes of the place that one uses after the other."""
    if how == "keep":
        return 0
    if how == "alternate":
        return in_chunks(c.nbytes, chunk_bytes)
    return SLOTS * in_chunks(c.block_bytes, chunk_bytes)


class _Alike(NamedTuple):
    """Blocks of one component, of which each saves a request as much. Bytes."""

    name: str
    number: int
    taken: int
    #: What is waited for no more, and what is copied no more, where each is kept.
    waited: float
    copied: int


def _alike(c: Component, bytes_per_s: float, chunk_bytes: int) -> Iterable[_Alike]:
    """What may be kept of `c`: until the rest of it hides behind computing, and beyond."""
    taken, copied = in_chunks(c.block_bytes, chunk_bytes), c.passes * c.block_bytes
    most = c.blocks - SLOTS
    waited = max(0.0, c.nbytes - c.rest_bytes - (c.compute_s or 0.0) * bytes_per_s)
    whole, part = divmod(waited, c.block_bytes)
    numbers = min(int(whole), most), min(int(whole) + 1, most)
    yield _Alike(c.name, numbers[0], taken, copied, copied)
    yield _Alike(c.name, numbers[1] - numbers[0], taken, c.passes * part, copied)
    yield _Alike(c.name, most - numbers[1], taken, 0.0, copied)


def _blocks_kept(
    streamed: Sequence[Component], left: int, bytes_per_s: float, chunk_bytes: int
) -> list[int]:
    """How many blocks of each `left` has room for.

    First what saves most waiting for the room it takes, then what saves most copying: so no
    more room is ever worse.
    """
    kept = dict.fromkeys((c.name for c in streamed), 0)
    found = [blocks for c in streamed for blocks in _alike(c, bytes_per_s, chunk_bytes)]
    for blocks in sorted(found, key=lambda b: (-b.waited / b.taken, -b.copied / b.taken)):
        fitting = min(left // blocks.taken, blocks.number)
        kept[blocks.name] += fitting
        left -= fitting * blocks.taken
    return [kept[c.name] for c in streamed]


def _placement(c: Component, how: How, share: int, bytes_per_s: float) -> Placement:
    transfer_s = c.nbytes / bytes_per_s
    kept = c.nbytes if how == "keep" else share
    step_s = request_s = 0.0
    moved = 0
    if how == "alternate":
        request_s, moved = stall.loaded_s(transfer_s), c.nbytes
    elif how == "stream":
        compute_s = c.compute_s or 0.0
        step_s = stall.step_s(transfer_s, kept / c.nbytes, compute_s)
        request_s = stall.streamed_s(transfer_s, kept / c.nbytes, compute_s, c.passes)
        moved = c.passes * (c.nbytes - kept)
    return Placement(
        name=c.name,
        how=how,
        nbytes=c.nbytes,
        kept_bytes=kept,
        swap_in_s=(c.nbytes - kept) / bytes_per_s,
        step_s=step_s,
        request_s=request_s,
        moved_bytes=moved,
        passes=c.passes,
        compute_known=c.compute_s is not None,
    )


def _too_much(components: Sequence[Component], memory: Memory, chunk_bytes: int) -> str:
    """The sum that does not come out, and what could be done about it."""
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
    terms += [f"what is in no block of {name} ({size(n)})" for name, n in rests.items()]
    total = least[most.name] + sum(in_chunks(n, chunk_bytes) for n in rests.values())
    return f"{memory}, and {' + '.join(terms)} = {size(total)} must fit there. It takes {instead}"
