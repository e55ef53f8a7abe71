"""When a grant was said to come, on the seven workloads: the core on a virtual clock."""

import pytest

from benchmarks.eta import simulate, within
from benchmarks.policy.workloads import workloads


@pytest.mark.parametrize("number", range(7))
def test_half_of_the_grants_come_as_said_and_nine_in_ten_within_a_half(number: int) -> None:
    waits = simulate(list(workloads(7))[number])
    assert len(waits) > 50
    assert within(waits, 0.15) >= 0.5
    assert within(waits, 0.5) >= 0.9
