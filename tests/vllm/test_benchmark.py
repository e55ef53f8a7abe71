"""The counts of the benchmark; no test judges its times."""

from pathlib import Path

import msgspec

from benchmarks.vllm import tax, turns
from benchmarks.vllm.rows import Row, Section, table
from tests.vllm.engines import Nursery


def test_swaps_are_within_their_bounds(models: Path, nursery: Nursery) -> None:
    rows = turns.order(models, nursery)
    assert len(rows) == 4
    assert all(row.bound is not None and row.holds for row in rows), rows


def test_a_stage_that_fits_swaps_nothing_while_it_is_measured(
    models: Path, nursery: Nursery
) -> None:
    section = tax.measure(models, nursery, starts=1, engines=1, rounds=1, turns=1)
    assert msgspec.json.decode(msgspec.json.encode(section), type=Section) == section


def test_a_bound_that_does_not_hold_is_said() -> None:
    row = Row("tokens/s", 0.5, "at least", 0.99, "slow")
    assert not row.holds
    assert "**FAILED** slow" in table([Section((row,), {})])
    assert Row("sleep and wake", None, note="not here").holds
