"""The cost of an event does not grow with the rest of the core: counted in byte codes.

`python -m benchmarks.scale` has times. Counts do not depend on the load of a machine.
"""

import statistics
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from benchmarks.scale import core
from benchmarks.scale.stage import Stage
from swapd.core.actions import Grant
from swapd.core.contents import Contents
from swapd.daemon.sessions import END_STEP

MOST_RATIO = 10.0


class Steps:
    """Counts the byte codes executed, by kind of event."""

    def __init__(self) -> None:
        self.counts: dict[str, list[float]] = {}
        self._count = 0

    def __call__(self, kind: str, act: Callable[[], Any]) -> Any:
        self._count, before = 0, sys.gettrace()
        sys.settrace(self._trace)
        try:
            result = act()
        finally:
            sys.settrace(before)
        granted = sum(isinstance(action, Grant) for action in result)
        self.counts.setdefault(kind, []).append(self._count / max(granted, 1))
        return result

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self._count += event == "opcode"
        return self._trace

    def medians(self) -> dict[str, float]:
        return {kind: statistics.median(counts) for kind, counts in self.counts.items()}


def steps(components: int, waiters: int) -> dict[str, float]:
    meter = Steps()
    stage = Stage(components, waiters, meter)
    for _ in range(7):
        stage.play()
    stage.long_end(min(components, 300), END_STEP)
    return meter.medians()


@pytest.mark.slow
@pytest.mark.parametrize("waiters", [0, 600])
def test_an_event_takes_no_more_than_ten_times_as_many_steps_among_very_many(waiters: int) -> None:
    found = {core.FEW: steps(*core.FEW), (3_000, waiters): steps(3_000, waiters)}
    ratios = core.ratios(found)
    assert len(ratios) > 30
    worst = {kind: row[3_000, waiters] for kind, row in ratios.items() if len(row) > 1}
    assert {kind: ratio for kind, ratio in worst.items() if ratio > MOST_RATIO} == {}


@pytest.mark.slow
@pytest.mark.parametrize("over", [None, ("family-0",)])
def test_prefetches_that_find_no_room_do_not_look_at_all_that_is_in_each(
    over: tuple[str, ...] | None,
) -> None:
    few, many = (steps_in_vain(components, over) for components in (200, 800))
    assert many < 8.0 * few  # 4 times as many; each beside all that is in: 16


def steps_in_vain(components: int, over: tuple[str, ...] | None) -> float:
    """Return the steps of a prefetch of families for which only expected components could go."""
    meter = Steps()
    stage = Stage(components, 0, meter)
    families = tuple(f"family-{i}" for i in range(components // 10))
    stage.prefetch(families, None, "all")
    stage.prefetch(families[len(families) * 3 // 4 :], over, "in vain")
    return meter.counts["in vain"][0]


def test_a_fill_in_vain_does_not_look_at_all_that_wait_for_each() -> None:
    few, many = (steps_of_a_fill_in_vain(waiting) for waiting in (50, 200))
    assert many < 8.0 * few  # 4 times as many; all for each: 16


def steps_of_a_fill_in_vain(waiting: int) -> float:
    meter, contents = Steps(), Contents()
    for uid in range(1, waiting + 2):
        contents.ask(uid, 1000 + uid, "weights", until=30.0)
        contents.ask(-uid, 1000 + uid, f"own {uid}", until=30.0)
    meter("gone", lambda: contents.gone(1))
    return meter.counts["gone"][0]
