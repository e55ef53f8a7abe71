"""The project's bounds, and whether the figures keep them.

Counts are always judged. Times are judged if the machine was quiet during the measurement.
A bound in microseconds is for one CPU: on another it is as many passes of the plain loop.
"""

from typing import Literal, NamedTuple

from swapd.bench.machine import too_busy
from swapd.bench.pace import REFERENCE_US
from swapd.bench.report import Judged, Report

#: Bound of swap_in_ratio on a GPU, whose copies do not use the CPU.
GPU_SWAP_IN = 0.95


class Bound(NamedTuple):
    """`key` is a field of Report; `of` is its measurement, a field of Raw."""

    key: str
    of: str
    side: Literal["at least", "at most"]
    value: float
    kind: Literal["count", "ratio of times", "microseconds"]


BOUNDS = (
    Bound("swap_in_ratio", "swap_in", "at least", 0.80, "ratio of times"),  # GPU_SWAP_IN there
    Bound("bytes_back", "swap_in", "at most", 0, "count"),
    Bound("hit_rtt_ratio", "hit", "at most", 1.5, "ratio of times"),
    Bound("decode_share", "decode", "at most", 0.01, "ratio of times"),
    Bound("hooks_share", "hooked", "at most", 0.01, "ratio of times"),
    Bound("handle_us", "handle", "at most", 30, "microseconds"),
    Bound("handle_busy_us", "handle_busy", "at most", 100, "microseconds"),
    Bound("fd_growth", "leaks", "at most", 0, "count"),
    Bound("rss_growth_bytes", "leaks", "at most", 2 << 20, "count"),
    Bound("stream_ratio", "stream", "at most", 1.15, "ratio of times"),
    Bound("stream_peak_blocks", "stream", "at most", 3, "count"),
    Bound("load_speed_ratio", "load", "at least", 0.80, "ratio of times"),
    Bound("load_memory_ratio", "load", "at most", 1.15, "count"),
)


def judge(report: Report, *, too_short: bool = False) -> dict[str, Judged]:
    """Judge every measured figure; `too_short`: judge the counts only."""
    return {
        bound.key: _judged(report, bound, too_short)
        for bound in BOUNDS
        if getattr(report, bound.key) is not None
    }


def _judged(report: Report, bound: Bound, too_short: bool) -> Judged:
    limit = _limit(report, bound)
    why = "" if bound.kind == "count" else _unclear(report, bound, too_short)
    if why:
        return Judged(bound.side, limit, "not judged", why)
    figure = getattr(report, bound.key)
    holds = figure >= limit if bound.side == "at least" else figure <= limit
    return Judged(bound.side, limit, "ok" if holds else "failed")


def _unclear(report: Report, bound: Bound, too_short: bool) -> str:
    """The reason why a time is not judged; "" if it is."""
    conditions = report.machine.conditions[bound.of]
    if too_short:
        return "too few rounds to judge times by"
    if busy := too_busy(conditions, report.machine):
        return f"machine busy: {busy}"
    if bound.kind == "microseconds" and conditions.waited is None:
        return "CPU time is not counted in microseconds here"
    return ""


def _limit(report: Report, bound: Bound) -> float:
    """The bound on this device and this CPU."""
    if bound.key == "swap_in_ratio" and report.device != "host":
        return GPU_SWAP_IN
    if bound.kind == "microseconds":
        loop_us: float = getattr(report.raw, bound.of).loop_us
        return bound.value * loop_us / REFERENCE_US
    return bound.value
