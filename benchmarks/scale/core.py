"""What each event of the core costs, with much of everything and with little: medians.

An event that lets in several waiters at once counts by what it takes for each.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.scale.stage import Stage
from swapd.core.actions import Grant
from swapd.daemon.daemon import END_STEP

#: The case that all others are compared with.
FEW = (10, 0)
#: Components of the session whose end takes several steps, where there are many.
OWNED = 3_300
#: How often it ends.
ENDS = 7

Case = tuple[int, int]


class Clock:
    """A meter of times, in seconds, by what was measured."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def __call__(self, kind: str, act: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = act()
        took = time.perf_counter() - began
        granted = sum(isinstance(action, Grant) for action in result)
        self.times.setdefault(kind, []).append(took / max(granted, 1))
        return result


def measure(cases: list[Case], rounds: int) -> dict[Case, dict[str, float]]:
    """Median seconds of each kind of event, by (components, waiters). The cases take turns."""
    clocks = {case: Clock() for case in [FEW, *cases]}
    stages = {case: Stage(*case, clock) for case, clock in clocks.items()}
    for _ in range(rounds):
        for stage in stages.values():
            stage.play()
    for _ in range(ENDS):
        for (components, _), stage in stages.items():
            stage.long_end(min(components, OWNED), END_STEP)
    return {
        case: {kind: statistics.median(times) for kind, times in clock.times.items()}
        for case, clock in clocks.items()
    }


def ratios(found: dict[Case, dict[str, float]]) -> dict[str, dict[Case, float]]:
    """By kind of event: what it costs over what it costs where there is little of everything.

    What cannot happen there is compared with the like of it.
    """
    few = {"Release, somebody waits": found[FEW]["Release"], **found[FEW]}
    kinds = dict.fromkeys(kind for case in found.values() for kind in case)
    return {
        kind: {case: times[kind] / few[kind] for case, times in found.items() if kind in times}
        for kind in sorted(kinds)
    }
