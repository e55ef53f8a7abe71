"""How the memory of one GPU is divided among stages of vLLM-Omni and a daemon. Pure.

The daemon's arena is counted once, for the weights of all stages that use swapd. It gets all of
them if they fit, else what the rest leaves, which must be as much as the largest needs at once.
What each stage has for itself (KV cache, activations) is its room: `gpu_memory_utilization` of
the whole, since vLLM's own sum leaves out what was there before it began, the arena included.
Beside that each process has a CUDA context, and graphs are captured after the KV cache was
allocated, in nobody's share.
"""

from collections.abc import Sequence
from math import floor

import msgspec

from swapd.plan import stall
from swapd.plan.advise import CHUNK_BYTES, DoesNotFit, in_chunks
from swapd.plan.pipelines import Kind
from swapd.shared.units import size

_GIB = 1 << 30

#: KV cache and activations of a stage, where nobody says: the least with which it serves.
LEAST_ROOM: dict[Kind, int] = {"ar": 4 * _GIB, "generation": 2 * _GIB, "diffusion": 4 * _GIB}
#: What a process has on a GPU before it allocates anything.
CONTEXT_BYTES = 512 << 20
#: What vLLM-Omni itself sets aside for the graphs of a stage, and for all that nobody counts.
GRAPHS_BYTES = 2 * _GIB
RESERVE_BYTES = 2 * _GIB
#: Utilisations are rounded down to so many parts of the whole.
_STEPS = 1000


class Part(msgspec.Struct, frozen=True):
    """Weights that come and go as one, or block by block. Bytes."""

    name: str
    nbytes: int
    #: What of them must be there while they are used.
    least: int
    stays: bool = False
    #: What they take of an arena, where that is not their whole chunks: each block has its own.
    by_block: int = 0

    @property
    def taken(self) -> int:
        return self.by_block or in_chunks(self.nbytes)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of a stage wants of its GPU. Bytes."""

    name: str
    stage_id: int
    kind: Kind
    ours: bool
    parts: tuple[Part, ...]
    #: Whether a step needs all parts; else it needs one after the other.
    at_once: bool = True
    room: int
    #: Whether that was said, so that more is not given.
    said: bool = False
    graphs: bool = False

    @property
    def weights(self) -> int:
        return sum(p.nbytes for p in self.parts)


class Share(msgspec.Struct, frozen=True):
    """What one process of a stage gets."""

    name: str
    stage_id: int
    ours: bool
    weights_bytes: int
    room_bytes: int
    #: Whether some of its weights may be out when a request comes, and how long they take then.
    takes_turns: bool
    swap_in_s: float


class Taken(msgspec.Struct, frozen=True):
    """One term of the sum."""

    nbytes: int
    what: str

    def __str__(self) -> str:
        return f"{size(self.nbytes)} {self.what}"


class GpuPlan(msgspec.Struct, frozen=True):
    """One GPU's memory, divided."""

    gpu: int
    total_bytes: int
    budget_bytes: int
    shares: tuple[Share, ...]
    #: Everything that is neither arena nor room.
    beside: tuple[Taken, ...]
    left_bytes: int
    #: Of a request that uses each stage once, by LRU; of what comes in by block, one step.
    moved_bytes: int
    request_s: float
    #: What comes in by block, again at each step.
    by_block: tuple[str, ...] = ()

    @property
    def takes_turns(self) -> list[str]:
        return [s.name for s in self.shares if s.takes_turns]


def divide(
    gpu: int,
    claims: Sequence[Claim],
    total: int,
    bytes_per_s: float,
    overhead: int | None = None,
) -> GpuPlan:
    """Divide a GPU of `total` bytes; `overhead` replaces what is assumed for contexts and graphs.

    One that no stage uses with swapd is as its stages say. Raises: DoesNotFit, with the sum.
    """
    ours = [c for c in claims if c.ours]
    beside = _beside(claims, overhead)
    room = sum(c.room for c in ours)
    free = total - sum(t.nbytes for t in beside) - room
    least, whole = _least(ours), sum(p.taken for c in ours for p in c.parts)
    if ours and free < least:
        raise DoesNotFit(_too_much(gpu, claims, total, beside, free))
    budget = min(whole, free // CHUNK_BYTES * CHUNK_BYTES) if ours else 0
    left = max(0, free - budget)  # less than nothing where swapd has no say
    more = _more(ours, left)
    fits = budget >= whole
    moved = 0 if fits else _moved(ours, budget)
    return GpuPlan(
        gpu=gpu,
        total_bytes=total,
        budget_bytes=budget,
        shares=tuple(_share(c, more.get(c.name, 0), fits, bytes_per_s) for c in claims),
        beside=tuple(beside),
        left_bytes=left - sum(more.values()),
        moved_bytes=moved,
        request_s=moved / bytes_per_s,
        by_block=_by_block(ours, budget),
    )


def utilization(room: int, total: int) -> float:
    """`gpu_memory_utilization` for so much room: never more than it."""
    return floor(room * _STEPS / total) / _STEPS


def _beside(claims: Sequence[Claim], overhead: int | None) -> list[Taken]:
    taken = [
        Taken(c.room, f"that {c.name} takes by itself, weights included")
        for c in claims
        if not c.ours
    ]
    if overhead is not None:
        return [*taken, Taken(overhead, "overhead")]
    processes = len(claims) + any(c.ours for c in claims)
    taken.append(Taken(processes * CONTEXT_BYTES, f"CUDA contexts of {processes} processes"))
    if graphs := [c.name for c in claims if c.graphs]:
        taken.append(Taken(len(graphs) * GRAPHS_BYTES, f"CUDA graphs of {', '.join(graphs)}"))
    return [*taken, Taken(RESERVE_BYTES, "in reserve")]


def _staying(claim: Claim) -> int:
    return sum(p.taken for p in claim.parts if p.stays)


def _turning(claim: Claim) -> int:
    """What a step needs beside what stays."""
    needs = [in_chunks(p.least) for p in claim.parts if not p.stays]
    return sum(needs) if claim.at_once else max(needs, default=0)


def _least(ours: Sequence[Claim]) -> int:
    return sum(_staying(c) for c in ours) + max((_turning(c) for c in ours), default=0)


def _more(ours: Sequence[Claim], left: int) -> dict[str, int]:
    """What is left over goes to those with a KV cache, by the size of their weights."""
    wanting = [c for c in ours if c.kind == "ar" and not c.said]
    of = sum(c.weights for c in wanting)
    return {c.name: left * c.weights // of for c in wanting} if of else {}


def _moved(ours: Sequence[Claim], budget: int) -> int:
    """Bytes of one request, each stage used once; of one whose parts are in turn, each of them."""
    turning: list[tuple[int, int]] = []  # what is taken, what is copied
    for c in ours:
        parts = [(p.taken, p.nbytes) for p in c.parts if not p.stays]
        turning += [(sum(t for t, _ in parts), sum(n for _, n in parts))] if c.at_once else parts
    room = budget - sum(_staying(c) for c in ours)
    streamed = sum(nbytes for taken, nbytes in turning if taken > room)
    whole = [taken for taken, _ in turning if 0 < taken <= room]
    return streamed + ((stall.lru_bytes(whole, room) or 0) if whole else 0)


def _by_block(ours: Sequence[Claim], budget: int) -> tuple[str, ...]:
    room = budget - sum(_staying(c) for c in ours)
    parts = [p for c in ours for p in c.parts if p.by_block and not p.stays]
    return tuple(p.name for p in parts if p.taken > room)


def _share(claim: Claim, more: int, fits: bool, bytes_per_s: float) -> Share:
    turning = sum(p.nbytes for p in claim.parts if not p.stays)
    takes_turns = claim.ours and not fits and turning > 0
    return Share(
        name=claim.name,
        stage_id=claim.stage_id,
        ours=claim.ours,
        weights_bytes=claim.weights,
        room_bytes=claim.room + more,
        takes_turns=takes_turns,
        swap_in_s=turning / bytes_per_s if takes_turns else 0.0,
    )


# --- what does not fit ---------------------------------------------------------------------


def _too_much(
    gpu: int, claims: Sequence[Claim], total: int, beside: Sequence[Taken], free: int
) -> str:
    ours = [c for c in claims if c.ours]
    less = "".join(f" - {t}" for t in beside)
    rooms = ", ".join(f"{c.name} {size(c.room)}" for c in ours)
    less += f" - {size(sum(c.room for c in ours))} KV caches and activations ({rooms})"
    left = size(free) if free > 0 else "nothing"
    terms = [f"{c.name}, which stays ({size(n)})" for c in ours if (n := _staying(c))]
    largest = max(ours, key=_turning)
    if turning := _turning(largest):
        terms.append(f"{largest.name}, the largest that takes turns ({size(turning)})")
    return (
        f"GPU {gpu} cannot hold these: {size(total)}{less} leaves {left} for weights, and "
        f"{' + '.join(terms)} = {size(_least(ours))} must fit there at once. "
        f"{_remedies(claims, largest)}"
    )


def _remedies(claims: Sequence[Claim], largest: Claim) -> str:
    ways = [f"less room (--room {largest.name}=SIZE)"]
    if graphs := [c.name for c in claims if c.graphs]:
        ways.append(f"no graphs (enforce_eager: true for {graphs[-1]})")
    ways += [
        f"swapd's worker for {c.name}, or less gpu_memory_utilization" for c in claims if not c.ours
    ]
    if any(_staying(c) for c in claims if c.ours):
        ways.append("turns for what stays (cpu_offload_enabled, without cpu_offload_components)")
    ways += ["quantised weights", f"{largest.name} over several GPUs (tensor_parallel_size)"]
    return f"It takes {', '.join(ways)}, or a larger GPU"
