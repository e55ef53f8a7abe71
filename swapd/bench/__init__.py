"""`swapd bench`: the costs of swapd, each with its baseline.

Every measurement runs both sides in turn and reports medians: the machine's speed drifts, the ratio
does not. `machine.py` watches the machine, and figures of a busy machine are not judged.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import msgspec

from swapd.bench import core, decode, hit, hooks, leaks, load, streaming, swap_in
from swapd.bench.machine import Machine
from swapd.bench.report import Judged, Measurements, Report, figures_of, judge

__all__ = ["Judged", "Measurements", "Report", "run"]


class _Measurement(NamedTuple):
    about: str
    measure: Callable[..., Any]
    #: Its settings in a quick run, in which every count is right, and the times have few rounds.
    quick: Mapping[str, float]
    #: Whether it runs on any device, on the host only, or on none.
    on: Literal["any", "host", "none"] = "any"


_LEAKS = f"{leaks.ROUNDS * leaks.CYCLES} swap cycles: descriptors, memory; then idle"
_CORE = {"count": 2_000}
_BLOCKS = {"rounds": 1, "block_s": 0.005}
_MEASUREMENTS = {
    # first: later it would count garbage and late descriptors of the other measurements
    "leaks": _Measurement(_LEAKS, leaks.measure, {"nbytes": 4 << 20}),
    "swap_in": _Measurement(
        "Swap-in against a plain copy", swap_in.measure, {"nbytes": 16 << 20, "rounds": 3}
    ),
    "hit": _Measurement(
        "A resident component against bare round trips", hit.measure, {"blocks": 2}
    ),
    "decode": _Measurement("A decode loop", decode.measure, {"steps": 20}),
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
    """Measure everything; takes about a minute. `say` gets the name of each measurement. `quick`:
    few rounds, by which only the counts are judged.

    Raises: ModuleNotFoundError before it measures anything, on the host without torch.
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
    report = Report(figures_of(raw), raw, machine.surroundings(), device, {})
    return msgspec.structs.replace(report, judged=judge(report, too_short=quick))
