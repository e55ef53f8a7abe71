"""The benchmark, with small sizes: it compares bytes, which do not depend on the machine."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.offload.measure import Plan, Report, Row, run, table
from tests.once import made_once


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    def make(path: Path) -> None:
        found = run(Plan(width=256, steps=3, pictures=2, rounds=1), lambda _: None)
        path.write_bytes(msgspec.json.encode(found))

    path = made_once(tmp_path_factory, "offload.json", make)
    return msgspec.json.decode(path.read_bytes(), type=Report)


def rows(report: Report, whose: str) -> list[Row]:
    found = [row for row in report.rows if row.name.startswith(whose)]
    assert found
    return found


def row(report: Report, name: str) -> Row:
    (found,) = [row for row in report.rows if row.name == name]
    return found


def test_every_side_makes_the_same_picture(report: Report) -> None:
    assert all(row.identical for row in report.rows)


def test_swapd_copies_nothing_back_and_moves_less_than_either(report: Report) -> None:
    streamed = row(report, "swapd enable_layerwise_offload")
    for ours in rows(report, "swapd"):
        assert ours.bytes_in > 0  # the device does not hold the whole model
        assert ours.bytes_back == 0
        if ours is not streamed:
            for theirs in rows(report, "diffusers") + rows(report, "vLLM-Omni"):
                assert ours.bytes_in < theirs.bytes_in + theirs.bytes_back
    groups = row(report, "diffusers enable_group_offload")
    assert streamed.bytes_in < groups.bytes_in  # some of the blocks stay on the device


def test_a_model_in_blocks_makes_room_for_encoders_by_a_part_of_it(report: Report) -> None:
    whole, blocks = row(report, "swapd lru"), row(report, "swapd lru, DiT in blocks")
    assert blocks.bytes_in < 0.8 * whole.bytes_in


def test_swapd_keeps_to_its_budget(report: Report) -> None:
    for ours in rows(report, "swapd"):
        assert ours.peak_bytes <= report.budget_bytes < sum(report.sizes.values())


def test_the_report_can_be_read_again(report: Report) -> None:
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    assert len(table(report).splitlines()) == 2 + len(report.rows)
