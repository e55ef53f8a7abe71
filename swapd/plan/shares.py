"""Divides the memory of one GPU among stages of vLLM-Omni and a daemon. Pure.

The daemon's arena is shared by the weights and KV caches of all stages with swapd. It holds all of
them if they fit. Else it gets the rest of the GPU, which must hold the largest turn: the permanent
components, and one stage's weights by layer with its KV cache. A KV cache takes turns even if
weights stay: the stage leases both together, and the cache leaves for other stages. A cache holds
one request, and more as long as a round moves no more bytes. The workspace of each stage
(activations, buffers) is its room, which torch keeps from turn to turn. Each process also has a
CUDA context; contexts and CUDA graphs are in no stage's share.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import floor

import msgspec
from msgspec.structs import replace

from swapd.plan import kv
from swapd.plan.advice import DoesNotFit
from swapd.plan.arena import SharedArena, chunk_of, largest_of
from swapd.plan.demands import Demand, GpuFacts, StreamPoint, Term, points
from swapd.shared.units import size
from swapd.shared.vm import round_up

_GIB = 1 << 30

#: Least KV cache of an unknown model.
USUAL_CACHE = 2 * _GIB
#: Largest KV cache of a stage that takes turns, unless one request needs more.
TURNS_CACHE = 8 * _GIB
#: Memory of a process before its first allocation.
CONTEXT_BYTES = 512 << 20
#: vLLM-Omni's own reserves: for the graphs of a stage, and for all uncounted memory.
GRAPHS_BYTES = 2 * _GIB
RESERVE_BYTES = 2 * _GIB
_STEPS = 1000


class GpuShare(msgspec.Struct, frozen=True):
    name: str
    stage_id: int
    ours: bool
    weights_bytes: int
    #: Memory outside the arena: activations and buffers; without swapd, all its memory.
    room_bytes: int
    #: Bytes and tokens of its KV cache, and the longest request; 0 without a cache, or if unknown.
    cache_bytes: int
    cache_tokens: int
    max_model_len: int
    #: Whether a request may find part of it absent; if so, its size in the arena, and the time to
    #: load its weights.
    takes_turns: bool
    turning_bytes: int
    swap_in_s: float
    #: Whether it runs without graphs, so that its layers can stream.
    eager: bool = False


class LargerCaches(msgspec.Struct, frozen=True):
    #: By stage: caches that are larger than planned.
    caches: dict[str, int]
    moved_bytes: int
    request_s: float


class GpuPlan(msgspec.Struct, frozen=True):
    gpu: int
    total_bytes: int
    budget_bytes: int
    shares: tuple[GpuShare, ...]
    #: Memory that is neither arena nor room.
    beside: tuple[Term, ...]
    left_bytes: int
    #: Everything outside the arena, and permanent components.
    stays_bytes: int
    #: The largest turn: its stage, its size, and the KV cache in it.
    largest: str
    turn_bytes: int
    turn_cache_bytes: int
    #: A round that uses each stage once: its bytes and copy time if stages leave by layers, and if
    #: stages leave as a whole. A streamed component counts for one step.
    moved_bytes: int
    request_s: float
    moved_whole_bytes: int
    whole_s: float
    #: An alternative with larger KV caches, which costs copies.
    larger: LargerCaches | None
    #: Sizes in the arena are whole chunks.
    chunk_bytes: int
    #: Components that load by block, again at each step.
    by_block: tuple[str, ...] = ()
    #: Points for each stage whose layers stream: as planned ("fastest"), half of the others, all.
    streams: tuple[StreamPoint, ...] = ()
    #: Why it does not fit with CUDA graphs and without streaming, or "".
    instead_of: str = ""

    @property
    def takes_turns(self) -> list[str]:
        return [s.name for s in self.shares if s.takes_turns]

    @property
    def stay_beside(self) -> list[str]:
        outside = sum(t.nbytes for t in self.beside)
        outside += sum(s.room_bytes for s in self.shares if s.ours)
        room, found = self.budget_bytes - (self.stays_bytes - outside) - self.turn_bytes, []
        others = [s for s in self.shares if s.takes_turns and s.name != self.largest]
        for share in sorted(others, key=lambda s: s.turning_bytes):
            room -= share.turning_bytes
            if room < 0:
                break
            found.append(share.name)
        return found


def divide(card: GpuFacts, claims: Sequence[Demand]) -> GpuPlan:
    """Divide a GPU. Without swapd on it, stages keep their settings. If a stage does not fit, its
    layers stream. Raises: DoesNotFit, with the sum.
    """
    try:
        return _divide(card, claims)
    except DoesNotFit as exc:
        arena, _ = _arena(card, claims)
        eager = [replace(c, eager=True, graphs=False) if arena.lacks(c) else c for c in claims]
        if eager == list(claims):
            raise
        arena, _ = _arena(card, eager)
        streaming = [c.streaming(arena.room_of(c)) if arena.lacks(c) else c for c in eager]
        try:
            plan = _divide(card, streaming)
        except DoesNotFit:
            raise exc from None
        return replace(plan, instead_of=str(exc))


def _divide(card: GpuFacts, claims: Sequence[Demand]) -> GpuPlan:
    arena, beside = _arena(card, claims)
    needed = arena.needed(_least_caches(arena.ours))
    if arena.ours and arena.nbytes < needed:
        raise DoesNotFit(too_much(card, claims, beside, arena.nbytes, needed))
    ours, caches, rate = arena.ours, _caches(arena), card.bytes_per_s
    budget = max(0, min(arena.whole(caches), arena.nbytes))
    moved, moved_whole = arena.moved(caches)
    turning = {c.name: c.turning(caches[c.name]) for c in ours}
    largest = max(turning, key=lambda name: turning[name], default="")
    outside = sum(t.nbytes for t in beside) + sum(c.room for c in ours)
    fits = arena.fits(caches)
    return GpuPlan(
        gpu=card.gpu,
        total_bytes=card.total,
        budget_bytes=budget,
        shares=tuple(_share(c, caches.get(c.name, 0), fits, rate) for c in claims),
        beside=tuple(beside),
        left_bytes=max(0, arena.nbytes - budget),  # 0 if stages without swapd exceed the GPU
        stays_bytes=outside + arena.stays,
        largest=largest,
        turn_bytes=turning.get(largest, 0),
        turn_cache_bytes=caches.get(largest, 0),
        moved_bytes=moved,
        request_s=moved / rate,
        moved_whole_bytes=moved_whole,
        whole_s=moved_whole / rate,
        larger=_larger(arena, caches, rate),
        chunk_bytes=chunk_of(ours),
        by_block=_by_block(ours, budget),
        streams=tuple(p for c in ours for p in points(c, arena.nbytes - arena.stays, rate)),
    )


def _arena(card: GpuFacts, claims: Sequence[Demand]) -> tuple["SharedArena", list[Term]]:
    ours = [c for c in claims if c.ours]
    beside, chunk = _beside(claims, card.overhead), chunk_of(ours)
    free = card.total - sum(t.nbytes for t in beside) - sum(c.room for c in ours)
    free = free // chunk * chunk
    if ours and card.budget is not None:
        if (given := card.budget // chunk * chunk) > free:
            raise DoesNotFit(too_large(card, ours, beside, free))
        beside.append(Term(free - given, f"outside of the budget of {size(card.budget)}"))
        free = given
    return SharedArena(ours, free), beside


def divide_all(
    claims: Mapping[int, Sequence[Demand]],
    totals: Mapping[int, int],
    bytes_per_s: float,
    overhead: int | None = None,
    budgets: Mapping[int, int] = {},
) -> list[GpuPlan]:
    """Divide each GPU, by number; a stage on several GPUs gets the same KV cache size on all.

    `budgets`: given by the user, by GPU. Raises: DoesNotFit, with the sum.
    """

    def divided(claims: Mapping[int, Sequence[Demand]]) -> list[GpuPlan]:
        return [
            divide(GpuFacts(gpu, totals[gpu], bytes_per_s, overhead, budgets.get(gpu)), on)
            for gpu, on in claims.items()
        ]

    plans = divided(claims)
    sizes: dict[str, set[int]] = {}
    for share in (share for plan in plans for share in plan.shares if share.cache_bytes):
        sizes.setdefault(share.name, set()).add(share.cache_bytes)
    if all(len(some) == 1 for some in sizes.values()):
        return plans

    def with_least(c: Demand) -> Demand:
        return replace(c, least_cache=min(sizes[c.name]), said=True) if c.least_cache else c

    return divided({gpu: list(map(with_least, on)) for gpu, on in claims.items()})


def utilization(room: int, total: int) -> float:
    """Return `gpu_memory_utilization` for `room` bytes, rounded down."""
    return floor(room * _STEPS / total) / _STEPS


def _beside(claims: Sequence[Demand], overhead: int | None) -> list[Term]:
    taken = [
        Term(c.room, f"that {c.name} takes by itself, weights included")
        for c in claims
        if not c.ours
    ]
    if overhead is not None:
        return [*taken, Term(overhead, "overhead")]
    processes = len(claims) + any(c.ours for c in claims)
    taken.append(Term(processes * CONTEXT_BYTES, f"CUDA contexts of {processes} processes"))
    if graphs := [c.name for c in claims if c.graphs]:
        taken.append(Term(len(graphs) * GRAPHS_BYTES, f"CUDA graphs of {', '.join(graphs)}"))
    return [*taken, Term(RESERVE_BYTES, "in reserve")]


# --- KV caches -----------------------------------------------------------------------------


def _least_caches(ours: Sequence[Demand]) -> dict[str, int]:
    return {c.name: c.cache_bytes() for c in ours}


def _caches(arena: SharedArena) -> dict[str, int]:
    caches = _least_caches(arena.ours)
    limit = arena.nbytes if arena.fits(caches) else TURNS_CACHE
    grow = [c for c in arena.ours if c.least_cache and not c.said and c.weights]
    for some in (grow, *([c] for c in grow)):  # first together, then each alone
        caches = _grown(arena, caches, some, limit)
    return caches


def _grown(
    arena: SharedArena, caches: Mapping[str, int], some: Sequence[Demand], limit: int
) -> dict[str, int]:
    """Enlarge the caches of `some`, in proportion to their weights and to at most `limit` each, as
    far as that costs nothing."""
    weights = [c.weights for c in some] or [1]

    def more(chunks: int) -> dict[str, int]:
        by = {c: chunks * c.weights // sum(weights) * c.chunk for c in some}
        larger = {c.name: c.cache_bytes(min(limit, caches[c.name] + n)) for c, n in by.items()}
        return {**caches, **larger}

    def costs_nothing(chunks: int) -> bool:
        larger = more(chunks)
        return arena.needed(larger) <= arena.nbytes and arena.cost(larger) <= arena.cost(caches)

    # enough for the lightest of them alone to get all memory
    chunks = arena.nbytes // chunk_of(arena.ours) * -(-sum(weights) // min(weights))
    return more(largest_of(chunks, costs_nothing))


def _larger(
    arena: SharedArena, caches: Mapping[str, int], bytes_per_s: float
) -> LargerCaches | None:
    turns = {c.name: arena.nbytes - arena.stays - c.turning(0) for c in arena.ours}
    most = {c.name: min(turns[c.name], c.cache_bytes(TURNS_CACHE)) for c in arena.ours}
    more = {name: nbytes for name, nbytes in most.items() if nbytes > caches[name]}
    moved, _ = arena.moved({**caches, **more})
    if arena.fits(caches) or moved <= arena.moved(caches)[0]:
        return None
    return LargerCaches(more, moved, moved / bytes_per_s)


def _by_block(ours: Sequence[Demand], budget: int) -> tuple[str, ...]:
    room = budget - sum(c.staying for c in ours)
    parts = [p for c in ours for p in c.parts if p.by_block and not p.stays]
    return tuple(p.name for p in parts if p.taken > room)


def _share(claim: Demand, cache: int, fits: bool, bytes_per_s: float) -> GpuShare:
    may_leave = claim.ours and not fits
    turning = [p for p in claim.parts if may_leave and not p.stays]
    taken = sum(p.taken for p in turning) + (cache if may_leave else 0)
    return GpuShare(
        name=claim.name,
        stage_id=claim.stage_id,
        ours=claim.ours,
        weights_bytes=claim.weights,
        room_bytes=claim.room,
        cache_bytes=cache,
        cache_tokens=kv.tokens_in(claim.cache, cache) if claim.cache else 0,
        max_model_len=claim.cache.max_model_len if claim.cache else 0,
        takes_turns=taken > 0,
        turning_bytes=taken,
        swap_in_s=sum(p.copied for p in turning) / bytes_per_s,
        eager=claim.eager,
    )


# --- why stages do not fit on a GPU, as a sum, and what would make them fit -----------------------


def too_large(card: GpuFacts, ours: Sequence[Demand], beside: Sequence[Term], free: int) -> str:
    left = size(free) if free > 0 else "nothing"
    return (
        f"GPU {card.gpu} cannot hold a budget of {size(card.budget or 0)}: {size(card.total)}"
        f"{_less(ours, beside)} leaves {left} for it. Say a budget of at most that, or none: then "
        "it is planned"
    )


def _less(ours: Sequence[Demand], beside: Sequence[Term]) -> str:
    rooms = ", ".join(f"{c.name} {size(c.room)}" for c in ours)
    terms = "".join(f" - {t}" for t in beside)
    return f"{terms} - {size(sum(c.room for c in ours))} workspace ({rooms})"


def too_much(
    card: GpuFacts, claims: Sequence[Demand], beside: Sequence[Term], free: int, needed: int
) -> str:
    ours = [c for c in claims if c.ours]
    left = size(free) if free > 0 else "nothing"
    terms = [f"{c.name}, which stays ({size(c.staying)})" for c in ours if c.staying]
    largest = max(ours, key=lambda c: c.turning(c.cache_bytes()))
    if largest.turning(largest.cache_bytes()):
        terms.append(f"{largest.name}, the largest that takes turns ({_turn_in_words(largest)})")
    return (
        f"GPU {card.gpu} cannot hold these: {size(card.total)}{_less(ours, beside)} leaves {left} "
        f"for weights and KV caches, and {' + '.join(terms)} = {size(needed)} must fit there at "
        "once. "
        f"{_remedies(claims, largest, free - needed)}"
    )


def _turn_in_words(claim: Demand) -> str:
    cache, weights = round_up(claim.least_cache, claim.chunk), claim.turning(0)
    if not cache:
        return size(weights)
    of = ""
    if claim.cache and not claim.said:
        of = f" for one request of {claim.cache.max_model_len} tokens, its max_model_len"
    beside = f"{size(weights)} of weights + " if weights else ""
    return f"{beside}{size(cache)} KV cache{of}"


def _remedies(claims: Sequence[Demand], largest: Demand, short: int) -> str:
    ways = [
        *_of_cache(largest, short),
        f"less workspace (a smaller max_num_batched_tokens for {largest.name})",
    ]
    if graphs := [c.name for c in claims if c.graphs]:
        ways.append(f"no graphs (enforce_eager: true for {graphs[-1]})")
    ways += [
        f"swapd's worker for {c.name}, or less gpu_memory_utilization" for c in claims if not c.ours
    ]
    if any(c.ours and c.staying for c in claims):
        ways.append("turns for permanent stages (cpu_offload_enabled, no cpu_offload_components)")
    ways += ["quantised weights", f"{largest.name} over several GPUs (tensor_parallel_size)"]
    return f"It takes {', '.join(ways)}, or a larger GPU"


def _of_cache(largest: Demand, short: int) -> Iterator[str]:
    if largest.said and largest.least_cache:
        yield f"a smaller KV cache (--room {largest.name}=SIZE)"
    elif largest.cache and not largest.said:
        least = round_up(largest.least_cache, largest.chunk)
        if (longest := kv.tokens_in(largest.cache, least + short)) > 0:
            yield f"max_model_len: {longest} or less for {largest.name}"
    if largest.least_cache and not largest.cache:
        yield "the model's config.json (--config FILE), from which caches are counted"
