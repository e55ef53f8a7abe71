"""Median cost of each event of the core, with large numbers of everything and with small ones.

An event that grants several waiters counts with its time for each grant.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.scale.stage import Stage
from swapd.core.actions import Grant
from swapd.daemon.sessions import END_STEP

#: The case that all others are compared with.
FEW = (10, 0)
#: Components of the session whose end takes several steps, in the large cases.
OWNED = 3_300
#: Number of such ends.
ENDS = 7

Case = tuple[int, int]


class Clock:
    """Collects times in seconds, by kind of event."""

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
    """By kind of event: its cost over its cost in the small case.

    Kinds that cannot occur there are compared with similar ones.
    """
    few = {"Release, somebody waits": found[FEW]["Release"], **found[FEW]}
    kinds = dict.fromkeys(kind for case in found.values() for kind in case)
    return {
        kind: {case: times[kind] / few[kind] for case, times in found.items() if kind in times}
        for kind in sorted(kinds)
    }
