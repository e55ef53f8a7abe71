"""Stages that stream (`async_chunk: true`), with room for the largest and a quarter of it more.

vllm-omni's schedulers, runners and connector, on a CPU; copies at 4 GB/s. The same with room for
all stands beside it.
"""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.vllm.rows import Row, Section, median, ratios
from tests.guarantees.harness import Daemon
from tests.vllm import streams, swaps
from tests.vllm.engines import Engine, Nursery, scene

BANDWIDTH = "4GB/s"
#: The first rounds are no steady state.
WARM_UP = 2

#: Bound of the time to the first sound, and of the whole, over the same with room for all.
BOUND = 1.5
#: Most loads of a stage for a request.
SWAPS = 4
CHUNKS = "by chunks"
#: Chunks for a first turn: the talker makes a sound of so many.
SETTINGS: Mapping[str, object] = {"chunks_per_turn": 8}


def measure(models: Path, nursery: Nursery, rounds: int) -> Section:
    """Seconds for a request; all sides in turn."""
    with scene(models, nursery) as made:
        sides: dict[str, tuple[Daemon, list[Engine]]] = {}
        for side, budget, settings in (
            ("room for all", streams.ROOM_FOR_ALL, SETTINGS),
            ("request by request", streams.BUDGET, {"chunks_per_turn": 0}),
            (CHUNKS, streams.BUDGET, SETTINGS),
        ):
            daemon = made.daemon(budget=budget, bandwidth=BANDWIDTH, isolation="relaxed")
            sides[side] = daemon, streams.start(made, daemon, settings)
        times: dict[str, list[float]] = {}
        came: dict[str, list[int]] = {side: [] for side in sides}
        for number in range(-WARM_UP, rounds):
            for side, (daemon, engines) in sides.items():
                before = len(copies(daemon))
                heard = streams.ask(engines, number + WARM_UP)
                if number >= 0:
                    times.setdefault(f"first sound, {side}", []).append(heard.first_s)
                    times.setdefault(f"whole, {side}", []).append(heard.whole_s)
                    came[side].append(len(copies(daemon)) - before)
    rows = []
    for what in ("first sound", "whole"):
        base = times[f"{what}, room for all"]
        rows.append(Row(f"s to the {what}, room for all", median(base)))
        for side in list(sides)[1:]:
            figure = median(ratios(times[f"{what}, {side}"], base))
            judged = side == CHUNKS
            rows.append(
                Row(
                    f"the same over that, room for the largest and a quarter, {side}",
                    figure,
                    "at most" if judged else None,
                    BOUND if judged else None,
                )
            )
    for side, counts in came.items():
        judged = side == CHUNKS
        rows.append(
            Row(
                f"times a stage came in for a request, {side}",
                max(counts),
                "at most" if judged else None,
                SWAPS if judged else None,
            )
        )
    return Section(tuple(rows), times)


def copies(daemon: Daemon) -> list[str]:
    """The loaded stages, in order."""
    daemon.watch.seen("CopyIn")  # read all events until now
    return swaps.copies_in(daemon.watch.history)
