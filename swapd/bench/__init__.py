"""`swapd bench`: the costs of swapd, each with its baseline.

Every measurement runs both sides in turn and reports medians: the machine's speed drifts, their
ratio does not. Counts are always judged, times only if the machine was quiet (`machine.py`). A
limit in microseconds scales with the time of the plain loop on this CPU.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec

from swapd.bench import core, hit, hooks, leaks, load, streaming, swap_in
from swapd.bench.hit import Decode
from swapd.bench.machine import REFERENCE_US, Machine, Surroundings, too_busy

#: Limit of swap_in_ratio on a GPU.
GPU_SWAP_IN = 0.95


class Measurements(msgspec.Struct, frozen=True):
    swap_in: swap_in.SwapIn
    hit: hit.Hit
    decode: Decode
    handle: core.Handle
    handle_busy: core.Handle
    leaks: leaks.Leaks
    load: load.LoadTimes
    #: Host device only, whose bandwidth can be set.
    stream: streaming.StreamTimes | None = None
    hooked: hooks.HookCosts | None = None


Verdict = Literal["ok", "failed", "not judged"]


class Judgement(msgspec.Struct, frozen=True):
    side: Literal["at least", "at most"]
    bound: float
    verdict: Verdict
    why: str = ""


class Report(msgspec.Struct, frozen=True):
    """The output of `swapd bench --json`, which has the figures on the first level."""

    #: By name, as in FIGURES.
    figures: dict[str, float]
    raw: Measurements
    machine: Surroundings
    device: str
    judged: dict[str, Judgement]


class Figure(NamedTuple):
    """A figure with its limit. `of`: a field of Measurements, and the value in it."""

    of: str
    side: Literal["at least", "at most"]
    bound: float
    kind: Literal["count", "ratio of times", "microseconds"]

    @property
    def measurement(self) -> str:
        return self.of.partition(".")[0]


FIGURES = {
    # speed of loading, from call to grant, over that of a plain copy: `torch.Tensor.copy_` on the
    # host; from pinned memory on a GPU, whose limit is GPU_SWAP_IN
    "swap_in_ratio": Figure("swap_in.ratio", "at least", 0.80, "ratio of times"),
    # bytes copied back to the host for clean components
    "bytes_back": Figure("swap_in.bytes_back", "at most", 0, "count"),
    # acquire and release of a resident component, over two bare round trips
    "hit_rtt_ratio": Figure("hit.ratio", "at most", 1.5, "ratio of times"),
    # share that acquire and release add to a loop with 5 ms per step
    "decode_share": Figure("decode.share", "at most", 0.01, "ratio of times"),
    # share that hooks add to a forward of a resident model with 16 blocks of 1 ms
    "hooks_share": Figure("hooked.share", "at most", 0.01, "ratio of times"),
    # mean time of `Residency.handle`, with 10 components and 10 waiters; with 100 and 1,000
    "handle_us": Figure("handle.mean_us", "at most", 30, "microseconds"),
    "handle_busy_us": Figure("handle_busy.mean_us", "at most", 100, "microseconds"),
    # descriptors left open by a round of swap cycles; growth of memory over all rounds
    "fd_growth": Figure("leaks.fds", "at most", 0, "count"),
    "rss_growth_bytes": Figure("leaks.rss_bytes", "at most", 2 << 20, "count"),
    # a pass over 16 blocks whose copies take as long as their computing, over computing alone; peak
    # on the device, in blocks
    "stream_ratio": Figure("stream.ratio", "at most", 1.15, "ratio of times"),
    "stream_peak_blocks": Figure("stream.peak_blocks", "at most", 3, "count"),
    # speed of loading a safetensors file, from call to acquirable, over that of reading it; peak
    # host memory over the file's bytes
    "load_speed_ratio": Figure("load.speed_ratio", "at least", 0.80, "ratio of times"),
    "load_memory_ratio": Figure("load.memory_ratio", "at most", 1.15, "count"),
}


def judge(report: Report, *, too_short: bool = False) -> dict[str, Judgement]:
    judged = {}
    for key, value in report.figures.items():
        figure, limit = FIGURES[key], _limit(report, key)
        why = "" if figure.kind == "count" else _unclear(report, figure, too_short)
        holds = value >= limit if figure.side == "at least" else value <= limit
        verdict: Verdict = "not judged" if why else "ok" if holds else "failed"
        judged[key] = Judgement(figure.side, limit, verdict, why)
    return judged


def _unclear(report: Report, figure: Figure, too_short: bool) -> str:
    conditions = report.machine.conditions[figure.measurement]
    if too_short:
        return "too few rounds to judge times by"
    if busy := too_busy(conditions, report.machine):
        return f"machine busy: {busy}"
    if figure.kind == "microseconds" and conditions.waited is None:
        return "CPU time is not counted in microseconds here"
    return ""


def _limit(report: Report, key: str) -> float:
    figure = FIGURES[key]
    if key == "swap_in_ratio" and report.device != "host":
        return GPU_SWAP_IN
    if figure.kind == "microseconds":
        loop_us: float = getattr(report.raw, figure.measurement).loop_us
        return figure.bound * loop_us / REFERENCE_US
    return figure.bound


class _Measurement(NamedTuple):
    about: str
    measure: Callable[..., Any]
    #: For a quick run: counts are right, but times have few rounds.
    quick: Mapping[str, float]
    #: Devices on which it runs; "none": it uses no device.
    on: Literal["any", "host", "none"] = "any"


_LEAKS = f"{leaks.ROUNDS * leaks.CYCLES} swap cycles: descriptors, memory; then idle"
_CORE = {"count": 2_000}
_BLOCKS = {"rounds": 1, "block_s": 0.005}
_MEASUREMENTS = {
    # first: later it would count garbage and late descriptors of other measurements
    "leaks": _Measurement(_LEAKS, leaks.measure, {"nbytes": 4 << 20}),
    "swap_in": _Measurement(
        "Swap-in against a plain copy", swap_in.measure, {"nbytes": 16 << 20, "rounds": 3}
    ),
    "hit": _Measurement(
        "A resident component against bare round trips", hit.measure, {"blocks": 2}
    ),
    "decode": _Measurement("A decode loop", hit.decode, {"steps": 20}),
    "hooked": _Measurement("Hooks around a model that fits", hooks.measure, {"rounds": 1}, "host"),
    "handle": _Measurement("The core alone", partial(core.measure, 10, 10), _CORE, "none"),
    "handle_busy": _Measurement("The core, busy", partial(core.measure, 100, 1000), _CORE, "none"),
    "stream": _Measurement(
        "A component streamed block by block", streaming.measure, _BLOCKS, "host"
    ),
    "load": _Measurement(
        "Loading safetensors against reading it", load.measure, {"nbytes": 32 << 20, "rounds": 1}
    ),
}


def run(say: Callable[[str], None], device: str = "host", *, quick: bool = False) -> Report:
    """Measure everything, which takes about a minute. `say` gets the name of each measurement.
    `quick`: few rounds, so only counts are judged.

    Raises: ModuleNotFoundError, at once, on the host without torch.
    """
    if device == "host" and find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    machine, found = Machine(), {}
    for name, one in _MEASUREMENTS.items():
        if one.on == "host" and device != "host":
            continue
        say(one.about)
        settings: dict[str, Any] = {"device": device} if one.on == "any" else {}
        settings |= one.quick if quick else {}
        found[name] = machine.watch(name, partial(one.measure, **settings))
    raw = Measurements(**found)
    figures = {
        key: attrgetter(figure.of)(raw)
        for key, figure in FIGURES.items()
        if figure.measurement in found
    }
    report = Report(figures, raw, machine.surroundings(), device, {})
    return msgspec.structs.replace(report, judged=judge(report, too_short=quick))
