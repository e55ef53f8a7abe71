"""Why stages of vLLM-Omni do not fit on a GPU, as a sum, and what would make them fit. Pure."""

from collections.abc import Iterator, Sequence

from swapd.plan import kv
from swapd.plan.advise import in_chunks
from swapd.plan.demands import Demand, GpuFacts, Term
from swapd.shared.units import size


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
    caches = {c.name: c.cache_bytes() for c in ours}
    left = size(free) if free > 0 else "nothing"
    stay = [(c, c.staying) for c in ours]
    terms = [f"{c.name}, which stays ({size(n)})" for c, n in stay if n]
    largest = max(ours, key=lambda c: c.turning(caches[c.name]))
    if largest.turning(caches[largest.name]):
        terms.append(f"{largest.name}, the largest that takes turns ({_turn_in_words(largest)})")
    return (
        f"GPU {card.gpu} cannot hold these: {size(card.total)}{_less(ours, beside)} leaves {left} "
        f"for weights and KV caches, and {' + '.join(terms)} = {size(needed)} must fit there at "
        "once. "
        f"{_remedies(claims, largest, free - needed)}"
    )


def _turn_in_words(claim: Demand) -> str:
    cache, weights = in_chunks(claim.least_cache, claim.chunk), claim.turning(0)
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
        least = in_chunks(largest.least_cache, largest.chunk)
        if (longest := kv.tokens_in(largest.cache, least + short)) > 0:
            yield f"max_model_len: {longest} or less for {largest.name}"
    if largest.least_cache and not largest.cache:
        yield "the model's config.json (--config FILE), from which caches are counted"
