"""How a plan divides the memory of one GPU among stages, and its refusals."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapd.plan.advice import CHUNK_BYTES, DoesNotFit
from swapd.plan.demands import Demand, GpuFacts, WeightGroup
from swapd.plan.kv import KvCache
from swapd.plan.omni import Kind
from swapd.plan.shares import (
    TURNS_CACHE,
    GpuPlan,
    divide,
    divide_all,
)

GIB = 1 << 30
MIB = 1 << 20


def claim(
    name: str,
    *parts: float | WeightGroup,
    room: float = 4,
    cache: float = 0,
    tokens: int = 0,
    kind: Kind = "ar",
    said: bool = False,
    ours: bool = True,
    graphs: bool = False,
    at_once: bool = True,
) -> Demand:
    return Demand(
        name=name,
        stage_id=0,
        kind=kind,
        ours=ours,
        parts=tuple(p if isinstance(p, WeightGroup) else part(name, p) for p in parts),
        at_once=at_once,
        room=round(room * GIB),
        least_cache=round(cache * GIB),
        cache=KvCache(max_model_len=tokens, block_tokens=16, block_bytes=MIB) if tokens else None,
        said=said,
        graphs=graphs,
    )


def part(name: str, gib: float, *, stays: bool = False, least: float | None = None) -> WeightGroup:
    return WeightGroup(
        name, round(gib * GIB), round((gib if least is None else least) * GIB), stays
    )


def layers(name: str, count: int, gib: float, rest: float = 0) -> WeightGroup:
    """So many layers of `gib` each, and `rest` GiB of other weights."""
    nbytes = round((count * gib + rest) * GIB)
    return WeightGroup(name, nbytes, nbytes, layers=count, layer_bytes=round(gib * GIB))


def divided(total: float, *claims: Demand, overhead: float | None = None) -> GpuPlan:
    spare = None if overhead is None else round(overhead * GIB)
    return divide(GpuFacts(0, round(total * GIB), 25e9, spare), claims)


def refused(total: float, *claims: Demand) -> str:
    with pytest.raises(DoesNotFit) as caught:
        divided(total, *claims)
    return str(caught.value)


def test_what_does_not_fit_together_takes_turns_in_what_the_rest_leaves() -> None:
    plan = divided(24, claim("a", 10), claim("b", 4))
    assert plan.budget_bytes == 12.5 * GIB
    assert plan.left_bytes == 0
    assert plan.takes_turns == ["a", "b"]
    assert plan.moved_bytes == 14 * GIB
    assert plan.request_s == pytest.approx(14 * GIB / 25e9)


def test_what_is_left_over_goes_to_the_kv_caches_by_weight() -> None:
    wanting = claim("a", 9, cache=1), claim("b", 3, cache=1)
    plan = divided(40, *wanting, claim("c", 1, kind="generation"))
    assert plan.left_bytes <= 2 * CHUNK_BYTES  # the remainder of the division
    a, b, c = (s.cache_bytes for s in plan.shares)
    assert c == 0
    assert abs((a - GIB) - 3 * (b - GIB)) <= 3 * CHUNK_BYTES
    assert plan.budget_bytes == 13 * GIB + a + b
    assert (plan.takes_turns, plan.moved_bytes) == ([], 0)


def test_a_cache_takes_turns_and_gets_what_its_own_turn_leaves() -> None:
    plan = divided(25, claim("a", 10, cache=1), claim("b", 4, cache=1))
    assert plan.budget_bytes == 13.5 * GIB
    assert [s.cache_bytes / GIB for s in plan.shares] == [3.5, TURNS_CACHE / GIB]
    assert (plan.largest, plan.turn_bytes) == ("a", 13.5 * GIB)
    assert plan.turn_cache_bytes == 3.5 * GIB
    assert plan.moved_bytes == 14 * GIB  # only weights, which leave as wholes with any cache
    assert plan.larger is None


def test_what_does_not_fit_by_caches_alone_copies_nothing() -> None:
    both = claim("a", layers("a", 40, 0.25), cache=1), claim("b", layers("b", 16, 0.25), cache=1)
    plan = divided(27, *both)
    assert plan.budget_bytes == 15.5 * GIB < 16 * GIB
    assert plan.takes_turns == ["a", "b"]
    assert (plan.moved_bytes, plan.moved_whole_bytes) == (0, 14 * GIB)


@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from((0.25, 1)), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 40),
)
def test_a_larger_cache_never_costs_a_copy(
    stages: list[tuple[int, float, int, bool]], more: int
) -> None:
    claims = [
        claim(str(n), layers(str(n), count, gib) if by_layer else count * gib, room=0, cache=cache)
        for n, (count, gib, cache, by_layer) in enumerate(stages)
    ]
    least = [msgspec.structs.replace(c, said=True) for c in claims]
    total = max(count * gib + cache for count, gib, cache, _ in stages) + more / 2
    plan, of_least = divided(total, *claims, overhead=0), divided(total, *least, overhead=0)
    assert plan.moved_bytes <= of_least.moved_bytes
    assert plan.takes_turns == of_least.takes_turns
    assert all(s.cache_bytes >= c.least_cache for s, c in zip(plan.shares, claims, strict=True))


@pytest.mark.parametrize("total", [23, 80])
def test_a_cache_grows_no_larger_than_its_requests_can_fill(total: float) -> None:
    bounded = msgspec.structs.replace(claim("a", 10, cache=1), most_cache=3 * GIB)
    plan = divided(total, bounded, claim("b", 4, cache=1))
    a, b = (s.cache_bytes for s in plan.shares)
    assert a == min(3 * GIB, plan.budget_bytes - 10 * GIB)
    assert b == plan.budget_bytes - 4 * GIB - (0 if plan.takes_turns else 10 * GIB + a)
    assert plan.left_bytes < CHUNK_BYTES


def test_of_a_stage_that_stays_the_cache_takes_turns() -> None:
    stays = claim("a", part("a", 6, stays=True), cache=1)
    plan = divided(23, stays, claim("b", 4, cache=1), claim("c", 1, room=0))
    beside = sum(t.nbytes for t in plan.beside) + 8 * GIB
    assert plan.stays_bytes == beside + 6 * GIB
    assert plan.budget_bytes == 23 * GIB - beside
    assert [s.cache_bytes for s in plan.shares] == [GIB, GIB, 0]
    assert plan.stays_bytes + plan.turn_bytes == 23 * GIB
    assert plan.takes_turns == ["a", "b", "c"]
    assert plan.moved_bytes == GIB, "c leaves; of a, nothing is copied"
    assert plan.larger is not None
    assert plan.larger.caches == {"a": 5 * GIB}, "what its own turn leaves"
    assert plan.shares[0].swap_in_s == 0


def test_what_stays_leaves_less_to_those_that_stay_beside_the_largest() -> None:
    def stay(total: float) -> list[str]:
        off = claim("off", part("off", 2, stays=True), room=0)
        turning = claim("a", 6, room=0), claim("b", 2, room=0), claim("c", 1, room=0)
        return divided(total, off, *turning, overhead=0).stay_beside

    assert stay(10) == ["c"], "b would be beside it, if off were not"
    assert stay(8.5) == []


def test_a_stage_on_several_gpus_has_one_size_of_cache() -> None:
    both = claim("a", 10, cache=1)
    claims = {0: [both], 1: [both, claim("b", 4, cache=1)]}
    plans = divide_all(claims, {0: 40 * GIB, 1: 40 * GIB}, 25e9)
    (on_0, on_1) = (plan.shares[0].cache_bytes for plan in plans)
    assert on_0 == on_1 > GIB
    assert plans[0].budget_bytes == 10 * GIB + on_0


def test_by_layers_no_more_moves_than_does_not_fit_twice() -> None:
    large = claim("a", layers("a", 40, 0.25), cache=1, said=True)
    plan = divided(25, large, claim("b", layers("b", 16, 0.25), cache=1, said=True))
    assert plan.budget_bytes == 13.5 * GIB
    # they take 16 GiB; 2.5 of them do not fit, and no cache is copied
    assert plan.moved_bytes == (2 * 2.5 - 2) * GIB
    assert plan.moved_whole_bytes == 14 * GIB
    assert plan.request_s == pytest.approx(3 * GIB / 25e9)


def test_of_a_pipeline_the_largest_component_must_fit() -> None:
    pipeline = claim("dit", 20, 10, 1, kind="diffusion", at_once=False)
    assert divided(28, pipeline).budget_bytes == 21 * GIB
    assert "dit, the largest that takes turns (20 GiB)" in refused(26, pipeline)


def test_what_is_streamed_needs_less_at_once() -> None:
    dit = WeightGroup("t", 20 * GIB, 2 * GIB, by_block=20 * GIB)
    pipeline = claim("dit", dit, kind="diffusion", at_once=False)
    plan = divided(12, pipeline)
    assert plan.budget_bytes == 5 * GIB
    assert plan.moved_bytes == 20 * GIB
    assert plan.by_block == ("t",)
    assert divided(40, pipeline).by_block == ()


def test_a_stage_without_swapd_takes_its_share_with_its_weights() -> None:
    plan = divided(40, claim("a", 10), claim("asr", 3, room=8, ours=False))
    assert plan.budget_bytes == 10 * GIB
    assert "8 GiB that asr takes by itself, weights included" in map(str, plan.beside)
    assert [s.ours for s in plan.shares] == [True, False]


def test_a_gpu_without_swapd_has_no_arena() -> None:
    plan = divided(40, claim("asr", 3, room=8, ours=False))
    assert plan.budget_bytes == 0
    assert sum(t.nbytes for t in plan.beside) == 10.5 * GIB  # one process, no daemon


def test_of_a_gpu_without_swapd_nothing_is_refused() -> None:
    plan = divided(24, claim("asr", 3, room=22, ours=False))
    assert (plan.budget_bytes, plan.left_bytes) == (0, 0)


def test_what_cannot_fit_is_refused_with_the_sum_and_what_to_change() -> None:
    said = refused(
        24,
        claim("thinker", 17, graphs=True),
        claim("talker", part("talker", 3, stays=True)),
        claim("asr", 1, room=2, ours=False),
    )
    assert "24 GiB - 2 GiB that asr takes by itself" in said
    assert "- 2 GiB CUDA contexts of 4 processes - 2 GiB CUDA graphs of thinker" in said
    assert "- 8 GiB workspace (thinker 4 GiB, talker 4 GiB)" in said
    assert "leaves 8 GiB for weights and KV caches" in said
    assert "talker, which stays (3 GiB) + thinker, the largest that takes turns (17 GiB)" in said
    assert "= 20 GiB must fit there at once" in said
    for way in (
        "max_num_batched_tokens for thinker",
        "enforce_eager: true for thinker",
        "worker for asr",
    ):
        assert way in said


def test_a_request_that_does_not_fit_is_refused_and_the_length_that_would_is_said() -> None:
    long = claim("thinker", 10, cache=6, tokens=96 * 1024)
    said = refused(21, long, claim("talker", 3, cache=1, tokens=1024))
    assert "leaves 9.5 GiB for weights and KV caches" in said
    assert (
        "thinker, the largest that takes turns (10 GiB of weights + 6 GiB KV cache for one request "
        "of 98304 tokens, its max_model_len) = 16 GiB must fit there at once"
    ) in said
    assert "max_model_len" not in said.partition("It takes")[2]  # at no length would it fit
    longest = (3 * GIB // 2 // MIB - 1) * 16
    said = refused(23, long, claim("talker", 3, cache=1, tokens=1024))
    assert f"It takes max_model_len: {longest} or less for thinker" in said
    fits = claim("thinker", 10, cache=1.5, tokens=longest)
    assert divided(23, fits, claim("talker", 3, cache=1)).shares[0].cache_tokens == longest
