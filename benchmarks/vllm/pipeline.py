"""One request through three stages in turn, with copies at 4 GB/s: the cost of each kind of turn.

A round is a request to each of three engines, one after the other, as in a pipeline; there is room
for two of the three. The same with room for all stands beside it.
"""

import time
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from benchmarks.vllm.rows import Row, Section, median, ratios
from tests.guarantees.harness import Daemon
from tests.vllm.engines import REQUESTS, Engine, Nursery, Scene, on_swapd, scene

#: 147, 130 and 112 MiB; any two fit.
NAMES = ("deep", "third", "less-deep")
BUDGET = "290MiB"
ROOM_FOR_ALL = "512MiB"
BANDWIDTH = "4GB/s"
#: Work of each stage for a request, in tokens.
TOKENS = 2
#: The first rounds are no steady state.
WARM_UP = 2

#: Bound of the best kind: stages evicted by layers, which compute on the first layers while the
#: rest arrives, with the next one loaded ahead.
BOUND = 1.25
#: Bound of a forward whose layers all check for resident weights, over one without checks.
HOOKS_BOUND = 1.01
FORWARDS = 60
WHOLE = {"worker_cls": "tests.vllm.whole.WholeWorker"}
ALL_IN = {"worker_cls": "tests.vllm.whole.AllInWorker"}
HOOKED = {"worker_cls": "tests.vllm.whole.HookedWorker"}
AHEAD = "by layers with segments, the next one ahead"
IN_ORDER: Mapping[str, object] = {"order": list(NAMES)}
ALONE: Mapping[str, object] = {"order": []}


def measure(models: Path, nursery: Nursery, rounds: int) -> Section:
    """Seconds for a round; all sides in turn."""
    with scene(models, nursery) as made:
        sides = {
            "room for all": _side(made, ROOM_FOR_ALL, ALONE, **HOOKED),
            "whole stages": _side(made, BUDGET, ALONE, **WHOLE),
            "by layers": _side(made, BUDGET, ALONE, **ALL_IN),
            "by layers with segments": _side(made, BUDGET, ALONE),
            AHEAD: _side(made, BUDGET, IN_ORDER),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        before: dict[str, int] = {}
        for number in range(-WARM_UP, rounds):
            for side, (daemon, engines) in sides.items():
                if not number:
                    before[side] = len(_waits(daemon))
                taken = _round(engines)
                if number >= 0:
                    times[side].append(taken)
        waits = {side: _waits(daemon)[before[side] :] for side, (daemon, _) in sides.items()}
        (forwards,) = sides["room for all"][1][0].call("forwards", FORWARDS)
    base = times["room for all"]
    rows = [Row("s a round of three stages, room for all", median(base))]
    for side in list(sides)[1:]:
        figure = median(ratios(times[side], base))
        row = Row(f"the same over that, room for two, {side}", figure)
        rows.append(row if side != AHEAD else replace(row, sense="at most", bound=BOUND))
    hooked = median(ratios([one for _, one in forwards], [bare for bare, _ in forwards]))
    rows.append(
        Row(
            "a forward whose layers all wait for what is there, over one of which none does",
            hooked,
            "at most",
            HOOKS_BOUND,
        )
    )
    for side, waited in waits.items():
        note = f"{sum(map(bool, waited))} of {len(waited)} turns began with a wait"
        rows.append(
            Row(f"s a round until a turn was granted, {side}", sum(waited) / rounds, note=note)
        )
    return Section(tuple(rows), times)


def _side(
    made: Scene, budget: str, settings: Mapping[str, object], **more: object
) -> tuple[Daemon, list[Engine]]:
    daemon = made.daemon(budget=budget, bandwidth=BANDWIDTH, isolation="relaxed")
    folders = [made.models / name for name in NAMES]
    stages = (on_swapd(one, daemon.folder, settings, **more) for one in folders)
    return daemon, made.start(*stages)


def _waits(daemon: Daemon) -> list[float]:
    """Seconds that each turn waited for its weights."""
    return [grant.waited_s for grant in daemon.watch.seen("Grant")]


def _round(engines: list[Engine]) -> float:
    began = time.perf_counter()
    for engine in engines:
        engine.generate(REQUESTS[0], TOKENS)
        engine.step(1)  # an empty step: as in a server's engine, it reports the end of the request
    return time.perf_counter() - began
