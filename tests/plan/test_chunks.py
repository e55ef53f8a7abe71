"""A plan chooses the chunk size: the given one, else the one with the fastest round."""

import pytest

from swapd.plan.advice import DoesNotFit
from swapd.plan.chunks import CALLS_S, Cost, chosen
from swapd.plan.demands import Demand, GpuFacts, WeightGroup
from swapd.plan.shares import GpuPlan, divide
from swapd.shared.config import GPU_CHUNK, HOST_CHUNK, LARGE_BUDGET, LARGE_CHUNK

GIB = 1 << 30
MIB = 1 << 20


def plans(small: Cost | None, large: Cost | None) -> dict[int, Cost | None]:
    return {GPU_CHUNK: small, LARGE_CHUNK: large}


def choice(found: dict[int, Cost | None], *settings: str) -> tuple[int, str]:
    """The chunk chosen, and why, from the cost with each chunk (None: it does not fit)."""

    def plan_with(nbytes: int) -> Cost:
        cost = found[nbytes]
        if cost is None:
            raise DoesNotFit("so much")
        return cost

    said = "auto" if "auto" in settings else None
    isolation = "strict" if "strict" in settings else "relaxed"
    plan, chosen_ = chosen(plan_with, lambda cost: cost, said, isolation)  # type: ignore[arg-type]
    assert plan is found[chosen_.nbytes], "what is counted with is what is said"
    return chosen_.nbytes, chosen_.why


OVER = [LARGE_BUDGET + GIB]
MOVES = Cost(OVER, 32 * GIB, 1.0)


def test_large_chunks_are_taken_where_a_round_takes_less() -> None:
    alike = plans(MOVES, MOVES)
    saved = 32 * GIB * (1 / GPU_CHUNK - 1 / LARGE_CHUNK) * CALLS_S
    for settings in ("auto",), ("strict",), ("auto", "strict"):
        nbytes, why = choice(alike, *settings)
        assert (nbytes, why) == (LARGE_CHUNK, "a round takes 16.1 ms less than in small ones")
    assert saved == pytest.approx(0.0161, abs=1e-4)
    dearer = MOVES._replace(copying_s=1.0 + saved * 0.9)
    assert choice(plans(MOVES, dearer), "auto")[0] == LARGE_CHUNK
    dearer = MOVES._replace(copying_s=1.0 + saved * 1.1)
    assert choice(plans(MOVES, dearer), "auto")[0] == GPU_CHUNK


def test_small_ones_are_taken_where_nobody_waits_for_an_unmapping() -> None:
    assert choice(plans(MOVES, MOVES)) == (GPU_CHUNK, "the default of --chunk on a GPU")


@pytest.mark.parametrize(
    ("small", "large", "why"),
    [
        (Cost([LARGE_BUDGET], 0, 0.0), None, "chunks of 256 MiB are for budgets over 8 GiB"),
        (Cost([*OVER, GIB], 0, 0.0), None, "chunks of 256 MiB are for budgets over 8 GiB"),
        (MOVES, None, "in chunks of 256 MiB it would not fit"),
        (MOVES, Cost(OVER, 40 * GIB, 1.2), "in chunks of 256 MiB a round would move 40 GiB"),
        (Cost(OVER, 0, 0.0), Cost(OVER, 0, 0.0), "in chunks of 256 MiB a round would move 0 B"),
    ],
)
def test_small_ones_are_taken_where_large_ones_are_no_better(
    small: Cost, large: Cost | None, why: str
) -> None:
    nbytes, said = choice(plans(small, large), "strict")
    assert nbytes == GPU_CHUNK
    assert said.startswith(why)


def test_what_is_said_is_counted_with() -> None:
    plan, choice = chosen(lambda nbytes: nbytes, lambda _: MOVES, 32 * MIB, "strict")
    assert (plan, choice.nbytes, choice.why) == (32 * MIB, 32 * MIB, "as given")


def divided(chunk: int, total: int = 80) -> GpuPlan:
    def stage(name: str, number: int, count: int, layer: int) -> Demand:
        nbytes = count * layer + 100 * MIB
        parts = (WeightGroup(name, nbytes, nbytes, layers=count, layer_bytes=layer, chunk=chunk),)
        return Demand(name=name, stage_id=number, kind="ar", ours=True, parts=parts, room=GIB)

    claims = [stage("a", 0, 40, GIB + MIB), stage("b", 1, 60, 300 * MIB)]
    return divide(GpuFacts(0, total * GIB, 2e9), claims)


@pytest.mark.parametrize("chunk", [2 * MIB, GPU_CHUNK, LARGE_CHUNK])
def test_all_that_a_plan_counts_is_in_whole_chunks(chunk: int) -> None:
    plan = divided(chunk, 62)
    assert plan.chunk_bytes == chunk
    for nbytes in plan.budget_bytes, plan.turn_bytes:
        assert nbytes % chunk == 0
    in_whole = -(-(GIB + MIB) // chunk) * chunk
    rest = -(-100 * MIB // chunk) * chunk
    assert plan.turn_bytes == 40 * in_whole + rest, "each layer has chunks of its own"


def test_a_budget_under_1_gib_is_counted_in_the_chunks_that_its_daemon_takes() -> None:
    under = Cost([GIB - GPU_CHUNK], 0, 0.0)
    for settings in (), ("auto",), ("strict",):
        nbytes, why = choice({GPU_CHUNK: under, HOST_CHUNK: under}, *settings)
        assert nbytes == HOST_CHUNK
        assert why == "the default of --chunk for budgets under 1 GiB"
    several = Cost([GIB - GPU_CHUNK, 2 * GIB], 0, 0.0)
    assert choice(plans(several, None))[0] == GPU_CHUNK, "one size for all: the larger counts"


def test_what_fits_in_the_chunks_of_a_small_budget_alone_is_planned() -> None:
    under = Cost([512 * MIB], 0, 0.0)
    assert choice({GPU_CHUNK: None, HOST_CHUNK: under})[0] == HOST_CHUNK
    for over in Cost([GIB], 0, 0.0), None:
        with pytest.raises(DoesNotFit):
            choice({GPU_CHUNK: None, HOST_CHUNK: over})
