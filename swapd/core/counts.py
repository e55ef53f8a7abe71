"""Counts by component, and histograms of durations, since the start: O(1) for each event.

Names come and go: counts of a component that is gone, or beyond the first `NAMES_MAX`, go to
`OTHERS`, so that sums over all names never fall. The parts of a family count as the family.
"""

from bisect import bisect_left

from swapd.shared.protocol import Counts, Histogram, Tally

#: Number of names with counts of their own.
NAMES_MAX = 500
#: The name for all others. No component has it.
OTHERS = ""
#: Upper bound of counted uses, which clients report: as many again still fit into 64 bits.
HITS_MAX = (1 << 63) - 1

#: Upper bounds of the classes for waits and copies, and for leases, which last longer.
SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LONG_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)


def new_counts() -> Counts:
    return Counts(
        of={OTHERS: Tally()},
        wait_s=_histogram(SHORT_S),
        copy_in_s=_histogram(SHORT_S),
        copy_out_s=_histogram(SHORT_S),
        hold_s=_histogram(LONG_S),
    )


def _histogram(bounds: tuple[float, ...]) -> Histogram:
    return Histogram(bounds, [0] * (len(bounds) + 1))


def observe(histogram: Histogram, seconds: float) -> None:
    histogram.counts[bisect_left(histogram.bounds, seconds)] += 1
    histogram.sum += seconds


def know(counts: Counts, name: str) -> Tally:
    """The tally of a component or family from now on: one of its own if there is room."""
    if len(counts.of) <= NAMES_MAX:
        return counts.of.setdefault(name, Tally())
    return counts.of.get(name) or counts.of[OTHERS]


def forget(counts: Counts, name: str) -> None:
    """The component or family is gone: add its counts to those of the others."""
    tally, others = counts.of.pop(name, None), counts.of[OTHERS]
    if tally is None:
        return
    others.loads += tally.loads
    others.evictions += tally.evictions
    others.hits = min(others.hits + tally.hits, HITS_MAX)
    others.skips += tally.skips
    for code, count in tally.refusals.items():
        others.refusals[code] = others.refusals.get(code, 0) + count
