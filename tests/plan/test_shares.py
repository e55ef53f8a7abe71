"""One GPU's memory: what is counted, what is given, and what cannot fit."""

import pytest

from swapd.plan.advise import DoesNotFit
from swapd.plan.pipelines import Kind
from swapd.plan.shares import Claim, GpuPlan, Part, divide, utilization

GIB = 1 << 30


def claim(
    name: str,
    *parts: float | Part,
    room: float = 4,
    kind: Kind = "ar",
    said: bool = True,
    ours: bool = True,
    graphs: bool = False,
    at_once: bool = True,
) -> Claim:
    return Claim(
        name=name,
        stage_id=0,
        kind=kind,
        ours=ours,
        parts=tuple(p if isinstance(p, Part) else part(name, p) for p in parts),
        at_once=at_once,
        room=round(room * GIB),
        said=said,
        graphs=graphs,
    )


def part(name: str, gib: float, *, stays: bool = False, least: float | None = None) -> Part:
    return Part(name, round(gib * GIB), round((gib if least is None else least) * GIB), stays)


def divided(total: float, *claims: Claim, overhead: float | None = None) -> GpuPlan:
    spare = None if overhead is None else round(overhead * GIB)
    return divide(0, claims, round(total * GIB), 25e9, spare)


def refused(total: float, *claims: Claim) -> str:
    with pytest.raises(DoesNotFit) as caught:
        divided(total, *claims)
    return str(caught.value)


def test_the_arena_is_counted_once_and_each_stage_has_its_room_beside() -> None:
    plan = divided(40, claim("a", 10), claim("b", 4))
    # 3 contexts of 0.5 GiB, the daemon's with them, and 2 GiB in reserve
    assert sum(t.nbytes for t in plan.beside) == 3.5 * GIB
    assert plan.budget_bytes == 14 * GIB
    assert [s.room_bytes for s in plan.shares] == [4 * GIB, 4 * GIB]
    assert plan.left_bytes == (40 - 3.5 - 14 - 8) * GIB
    assert (plan.takes_turns, plan.moved_bytes) == ([], 0)


def test_what_does_not_fit_together_takes_turns_in_what_the_rest_leaves() -> None:
    plan = divided(24, claim("a", 10), claim("b", 4))
    assert plan.budget_bytes == 12.5 * GIB
    assert plan.left_bytes == 0
    assert plan.takes_turns == ["a", "b"]
    assert plan.moved_bytes == 14 * GIB
    assert plan.request_s == pytest.approx(14 * GIB / 25e9)


def test_graphs_are_captured_beside_the_shares() -> None:
    without = divided(40, claim("a", 10))
    plan = divided(40, claim("a", 10, graphs=True))
    assert without.left_bytes - plan.left_bytes == 2 * GIB


def test_what_is_left_over_goes_to_the_kv_caches_by_weight() -> None:
    wanting = claim("a", 9, said=False), claim("b", 3, said=False)
    plan = divided(40, *wanting, claim("c", 1, kind="generation", said=False))
    assert plan.left_bytes < 2  # what does not divide
    a, b, c = (s.room_bytes for s in plan.shares)
    assert (a - 4 * GIB) == pytest.approx(3 * (b - 4 * GIB))
    assert c == 4 * GIB


def test_what_stays_is_beside_what_takes_turns() -> None:
    stays = claim("a", part("a", 6, stays=True), part("a.visual", 1))
    plan = divided(22, stays, claim("b", 4))
    assert plan.budget_bytes == 10.5 * GIB
    assert plan.takes_turns == ["a", "b"]
    assert plan.moved_bytes == 5 * GIB  # the visual part and b; the rest never


def test_of_a_pipeline_the_largest_component_must_fit() -> None:
    pipeline = claim("dit", 20, 10, 1, kind="diffusion", at_once=False)
    assert divided(28, pipeline).budget_bytes == 21 * GIB
    assert "dit, the largest that takes turns (20 GiB)" in refused(26, pipeline)


def test_what_is_streamed_needs_less_at_once() -> None:
    dit = Part("t", 20 * GIB, 2 * GIB, by_block=20 * GIB)
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


def test_overhead_can_be_said() -> None:
    plan = divided(20, claim("a", 10, graphs=True), overhead=1)
    assert [str(t) for t in plan.beside] == ["1 GiB overhead"]
    assert plan.left_bytes == 5 * GIB


def test_what_cannot_fit_is_refused_with_the_sum_and_what_to_change() -> None:
    said = refused(
        24,
        claim("thinker", 17, graphs=True),
        claim("talker", part("talker", 3, stays=True)),
        claim("asr", 1, room=2, ours=False),
    )
    assert "24 GiB - 2 GiB that asr takes by itself" in said
    assert "- 2 GiB CUDA contexts of 4 processes - 2 GiB CUDA graphs of thinker" in said
    assert "- 8 GiB KV caches and activations (thinker 4 GiB, talker 4 GiB)" in said
    assert "leaves 8 GiB for weights" in said
    assert "talker, which stays (3 GiB) + thinker, the largest that takes turns (17 GiB)" in said
    assert "= 20 GiB must fit there at once" in said
    for way in ("--room thinker=SIZE", "enforce_eager: true for thinker", "worker for asr"):
        assert way in said


def test_where_the_rest_alone_is_too_much_nothing_is_left() -> None:
    assert "leaves nothing for weights" in refused(4, claim("a", 1))


def test_a_utilization_is_never_more_than_the_room() -> None:
    assert utilization(4 * GIB, 80 * GIB) == 0.05
    assert utilization(GIB, 3 * GIB) == 0.333
