"""`python -m benchmarks.modelled` runs, and counts correctly. No test judges its times."""

from benchmarks.modelled.measure import Costs, evictions, swap_ins

MIB = 1 << 20


def test_what_is_mapped_for_a_swap_in_is_mapped_once_and_allowed_in_few_calls() -> None:
    """A swap-in of 16 chunks allows access after 8, 4, 2, 1, and for the last one at the end."""
    done = swap_ins(Costs(gbps=4), "2MiB", 32 * MIB, 2)
    assert 0 < done.calls["cuMemMap"] <= 16  # 0 if all are still mapped
    assert 1 <= done.calls["cuMemSetAccess"] <= 5


def test_an_eviction_costs_what_its_chunks_cost() -> None:
    small, large = (evictions(Costs(gbps=4), chunk, 64 * MIB, 2) for chunk in ("2MiB", "8MiB"))
    assert small.calls["cuMemUnmap"] == large.calls["cuMemUnmap"] == 1  # all chunks at once
    assert small.calls_ms == 4 * large.calls_ms
