"""A plan fits, has the shortest waits, and follows the rules of the documents."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swapd.plan.advice import (
    SLOTS,
    Advice,
    DoesNotFit,
    MemoryBudget,
    ModelComponent,
    Treatment,
    advise,
    lru_bytes,
)

GIB = 1 << 30
MIB = 1 << 20


def blocks(
    name: str, gib: float, count: int, passes: int = 1, compute_s: float | None = None
) -> ModelComponent:
    nbytes = round(gib * GIB)
    return ModelComponent(name, nbytes, count, -(-nbytes // count), 0, passes, compute_s)


def ways(advice: Advice) -> dict[str, str]:
    return {p.name: p.how for p in advice.placements}


def placed(advice: Advice, name: str) -> Treatment:
    (found,) = [p for p in advice.placements if p.name == name]
    return found


# --- the examples of the documents --------------------------------------------------------


@pytest.mark.parametrize(
    ("gib", "how"), [(2, "keep"), (8, "keep"), (13.6, "stream"), (24, "stream")]
)
def test_only_what_does_not_fit_is_offloaded(gib: float, how: str) -> None:
    memory = MemoryBudget(16 * GIB, kv_cache=4 * GIB, overhead=2 * GIB)
    assert ways(advise([blocks("model", gib, 32)], memory, 25e9)) == {"model": how}


def test_stages_that_fit_by_turns_alternate() -> None:
    """Tokens pass over the weights so often that one load is better than streaming."""
    stages = [
        blocks("thinker", 17, 28, passes=100),
        blocks("talker", 3, 24, passes=100),
        blocks("code2wav", 1.5, 8),
    ]
    advice = advise(stages, MemoryBudget(24 * GIB, kv_cache=3 * GIB, overhead=2 * GIB), 25e9)
    assert ways(advice) == {"thinker": "alternate", "talker": "alternate", "code2wav": "keep"}
    assert advice.budget_bytes == round(18.5 * GIB)


def test_a_dit_that_computes_long_enough_hides_its_copies() -> None:
    memory = MemoryBudget(12 * GIB)
    slow, fast = 2.0, 0.1
    advice = advise([blocks("dit", 20, 40, passes=20, compute_s=slow)], memory, 25e9)
    assert (placed(advice, "dit").step_s, advice.request_s) == (0.0, 0.0)
    advice = advise([blocks("dit", 20, 40, passes=20, compute_s=fast)], memory, 25e9)
    dit = placed(advice, "dit")
    assert dit.step_s == pytest.approx((dit.nbytes - dit.kept_bytes) / 25e9 - fast)
    assert dit.request_s == pytest.approx(20 * dit.step_s)


def test_room_goes_to_what_is_passed_over_most_often() -> None:
    components = [blocks("encoder", 8, 32), blocks("dit", 8, 32, passes=20)]
    advice = advise(components, MemoryBudget(10 * GIB), 25e9)
    assert placed(advice, "dit").how == "keep"
    assert placed(advice, "encoder").how == "stream"


def test_no_room_goes_to_what_computing_hides_while_it_saves_waiting_elsewhere() -> None:
    hidden = blocks("dit", 16, 32, passes=20, compute_s=2.0)
    advice = advise([hidden, blocks("encoder", 16, 32)], MemoryBudget(12 * GIB), 25e9)
    assert placed(advice, "dit").kept_bytes == 0
    assert placed(advice, "encoder").kept_bytes == 11 * GIB
    alone = advise([hidden], MemoryBudget(12 * GIB), 25e9)
    assert placed(alone, "dit").kept_bytes == 11 * GIB, "it saves copying all the same"


# --- room ---------------------------------------------------------------------------------


def test_what_is_in_no_block_stays_in() -> None:
    model = ModelComponent("model", 10 * GIB, 16, GIB // 2, rest_bytes=2 * GIB)
    (placement,) = advise([model], MemoryBudget(4 * GIB), 25e9).placements
    assert placement.kept_bytes == 2 * GIB + 2 * (GIB // 2)
    with pytest.raises(DoesNotFit, match="the part of model in no block"):
        advise([model], MemoryBudget(3 * GIB - MIB), 25e9)


def test_blocks_take_whole_chunks() -> None:
    exact = ModelComponent("model", 64 * 64 * MIB, 64, 64 * MIB)
    wasteful = ModelComponent("model", 64 * 65 * MIB, 64, 65 * MIB)
    assert advise([exact], MemoryBudget(GIB), 25e9).placements[0].kept_bytes == 14 * 64 * MIB
    assert advise([wasteful], MemoryBudget(GIB), 25e9).placements[0].kept_bytes == 6 * 65 * MIB


def test_small_blocks_are_streamed_in_groups() -> None:
    tiny = ModelComponent("tiny", 256 * MIB, 256, MIB)
    (placement,) = advise([tiny], MemoryBudget(192 * MIB), 25e9).placements
    assert placement.kept_bytes == 64 * MIB  # beside two slots of 64 blocks each


def test_what_cannot_be_streamed_must_fit_whole() -> None:
    with pytest.raises(DoesNotFit, match=r"vae whole \(3 GiB\).*--blocks vae=N"):
        advise([ModelComponent("vae", 3 * GIB)], MemoryBudget(2 * GIB), 25e9)


def test_many_components_are_not_weighed_for_ever() -> None:
    many = [blocks(f"c{i}", 1, 16) for i in range(40)]
    assert advise(many, MemoryBudget(36 * GIB), 25e9).budget_bytes <= 36 * GIB
    assert advise(many, MemoryBudget(4 * GIB), 25e9).budget_bytes <= 4 * GIB


def made(of: list[tuple[int, int, int, float | None]]) -> list[ModelComponent]:
    return [
        ModelComponent(f"c{i}", gib * GIB, count, gib * GIB // max(count, 1), 0, passes, compute)
        for i, (gib, count, passes, compute) in enumerate(of)
    ]


COMPONENTS = st.lists(
    st.tuples(
        st.integers(1, 24),
        st.sampled_from([0, 4, 24]),
        st.sampled_from([1, 20]),
        st.sampled_from([None, 0.05, 1.0]),
    ),
    min_size=1,
    max_size=4,
).map(made)


def tried(components: list[ModelComponent], gib: int) -> Advice | None:
    try:
        return advise(components, MemoryBudget(gib * GIB), 25e9)
    except DoesNotFit:
        return None


@example(made([(13, 0, 1, None), (23, 4, 1, 1.0), (7, 4, 1, None)]), 27, 4)
@given(COMPONENTS, st.integers(1, 60), st.integers(1, 20))
def test_what_is_advised_fits_and_more_memory_never_waits_longer(
    components: list[ModelComponent], gib: int, more: int
) -> None:
    advice = tried(components, gib)
    if advice is None:
        return
    assert advice.budget_bytes <= gib * GIB
    larger = tried(components, gib + more)
    assert larger is not None
    assert larger.request_s <= advice.request_s + 1e-9


@given(COMPONENTS, st.integers(1, 60))
def test_a_request_waits_as_long_as_was_said(components: list[ModelComponent], gib: int) -> None:
    """A step-by-step simulation of requests: one place that all use in turn, one copy at a time."""
    advice = tried(components, gib)
    if advice is None:
        return
    waited = slack = 0.0
    in_place = ""
    for _ in range(3):
        for c, p in zip(components, advice.placements, strict=True):
            if p.how == "alternate":
                waited += 0.0 if in_place == c.name else c.nbytes / 25e9
            elif p.how == "stream":
                once, most = streamed(c, p)
                waited += once
                slack += most
            if p.how != "keep":
                in_place = c.name
    assert waited == pytest.approx(3 * advice.request_s, rel=1e-6, abs=slack + 1e-6)


def simulated(blocks: int, every: int, copy_s: float, compute_s: float, passes: int) -> float:
    """Seconds waited in `passes` over `blocks`, of which one in `every` is streamed."""
    copied_at = computed_at = 0.0
    left_at: list[float] = []  # when each slot's block had been used, in order
    for number in range(blocks * passes):
        ready_at = 0.0
        if number % every == 0:
            free_at = left_at[-SLOTS] if len(left_at) >= SLOTS else 0.0
            copied_at = ready_at = max(copied_at, free_at) + copy_s
        computed_at = max(computed_at, ready_at) + compute_s
        if number % every == 0:
            left_at.append(computed_at)
    return computed_at - blocks * passes * compute_s


def streamed(c: ModelComponent, p: Treatment) -> tuple[float, float]:
    """The seconds that a streamed component waits, and the largest error of the formula."""
    copy_s, compute_s = c.block_bytes / 25e9, (c.compute_s or 0.0) / c.blocks
    moved = c.blocks - p.kept_bytes // c.block_bytes
    every = c.blocks // moved
    if every * moved != c.blocks:  # the streamed blocks are not spread evenly
        return p.request_s, 0.0
    waited = simulated(c.blocks, every, copy_s, compute_s, c.passes)
    return waited, SLOTS * copy_s + every * compute_s


@given(st.integers(2, 8), st.integers(1, 8))
def test_lru_misses_all_of_a_cycle_that_does_not_fit(n: int, room: int) -> None:
    assert lru_bytes([1] * n, room) == (0 if n <= room else n)


def test_lru_spares_what_need_not_go() -> None:
    assert lru_bytes([60, 8, 2], 66) == 68  # the small component fits beside either
    assert lru_bytes([3, 9], 8) is None


def test_what_leaves_no_room_at_all_is_said() -> None:
    with pytest.raises(DoesNotFit, match="leaves nothing for weights"):
        advise([blocks("dit", 1, 32)], MemoryBudget(4 * GIB, 5 * GIB), 25e9)


def test_a_rank_of_a_pipeline_may_have_all_that_is_in_no_layer() -> None:
    """And one layer more than others."""
    model = ModelComponent("model", 10 * GIB, 15, GIB // 2, rest_bytes=GIB)
    assert model.share(2, 1) == 5 * GIB
    assert model.share(1, 2) == 5 * GIB
    assert model.share(2, 2) == 5 * GIB // 2
    assert ModelComponent("whole", 10 * GIB).share(2, 2) == 10 * GIB // 4
