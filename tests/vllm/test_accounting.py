"""vLLM's own arithmetic confirms the plan of `swapd plan --vllm`."""

import msgspec

from swapd.plan.demands import Demand, GpuFacts, WeightGroup
from swapd.plan.omni import Kind
from swapd.plan.shares import GpuPlan, divide, utilization
from tests.vllm.engines import Nursery

GIB = 1 << 30
MIB = 1 << 20
#: As in `accounting`.
BUFFERS, PEAK, KERNELS = 96 * MIB, 700 * MIB, 130 * MIB
STAGES: tuple[tuple[str, float, Kind], ...] = (
    ("thinker", 17, "ar"),
    ("talker", 3, "ar"),
    ("code2wav", 1.5, "generation"),
)


def planned(total: int) -> GpuPlan:
    claims = [
        Demand(
            name=name,
            stage_id=number,
            kind=kind,
            ours=True,
            parts=(WeightGroup(name, round(gib * GIB), round(gib * GIB)),),
            room=2 * GIB,
            least_cache=2 * GIB if kind == "ar" else 0,
        )
        for number, (name, gib, kind) in enumerate(STAGES)
    ]
    return divide(GpuFacts(0, total, 25e9), claims)


def test_each_stage_has_the_cache_that_was_planned_and_the_arena_is_counted_once(
    nursery: Nursery,
) -> None:
    plans = [planned(32 * GIB), planned(48 * GIB)]
    assert [bool(plan.takes_turns) for plan in plans] == [True, False]
    said = nursery.call("tests.vllm.accounting:run_all", msgspec.json.encode(plans).decode())
    for plan, found in zip(plans, said, strict=True):
        for share in (s for s in plan.shares if s.cache_bytes):
            assert found["kv_cache"][share.name] == share.cache_bytes
        # without a cache: its utilisation, less its own use; the other stages do not count
        (alone,) = [s for s in plan.shares if not s.cache_bytes]
        used = int(plan.total_bytes * utilization(alone.room_bytes, plan.total_bytes))
        assert found["kv_cache"][alone.name] == used - BUFFERS - PEAK - KERNELS
        # left: the reserve, and memory that each stage needs only while it computes
        assert found["free"] >= 2 * GIB + len(STAGES) * PEAK
