"""Counts by component and durations of all events so far.

Pure arithmetic. Names come and go: counts of a name that is gone, or beyond the first `NAMES_MAX`,
go to `OTHERS`, so that sums over all never fall.
"""

from bisect import bisect_left
from dataclasses import dataclass, field

#: Number of names with counts of their own.
NAMES_MAX = 500
#: The name for all others. No component has it.
OTHERS = ""

#: Upper bounds of the classes for waits and copies, and for leases, which last longer.
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LONG_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)


@dataclass(slots=True)
class Tally:
    """Counts of one component, or of all others together."""

    loads: int = 0
    evictions: int = 0
    hits: int = 0
    skips: int = 0
    #: By code.
    refusals: dict[str, int] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        self.loads += other.loads
        self.evictions += other.evictions
        self.hits += other.hits
        self.skips += other.skips
        for code, count in other.refusals.items():
            self.refusals[code] = self.refusals.get(code, 0) + count


class Histogram:
    """A histogram of durations in seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        #: The count of each class; the last class has no upper bound.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        seconds = max(seconds, 0.0)  # a wall clock may be set back
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class Counts:
    """Counts of one run of a daemon."""

    def __init__(self) -> None:
        self.of: dict[str, Tally] = {OTHERS: Tally()}
        self.bytes_in = 0
        self.bytes_out = 0
        self.wait = Histogram(SHORT_S)
        self.copy_in = Histogram(SHORT_S)
        self.copy_out = Histogram(SHORT_S)
        self.hold = Histogram(LONG_S)
        self.records = 0
        #: Missing records: if there are any, the counts are too low.
        self.missed = 0

    def know(self, name: str) -> None:
        """Count `name` separately from now on, if there is room."""
        if len(self.of) <= NAMES_MAX:
            self.of.setdefault(name, Tally())

    def forget(self, name: str) -> None:
        if name != OTHERS and (tally := self.of.pop(name, None)):
            self.of[OTHERS].add(tally)

    def tally(self, name: str) -> Tally:
        """The counts that `name` belongs to."""
        return self.of.get(name) or self.of[OTHERS]
