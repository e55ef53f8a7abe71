"""How long a stage takes from its process's first instruction until it is ready to serve."""

import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.vllm.rows import Row, Section, median, ratios
from tests.vllm.engines import Scene, on_swapd, plain, scene

BOUND = 1.2

SIZES = {"thinker": "54 MiB", "large": "313 MiB"}


def measure(models: Path, rounds: int) -> Section:
    """Each start is a new process; the first of each side is not counted."""
    rows = []
    raw = {}
    with scene(models) as made:
        daemon = made.daemon(budget="384MiB", isolation="relaxed")
        for name, nbytes in SIZES.items():
            sides = {
                "plugin": on_swapd(models / name, daemon.folder),
                "plain": plain(models / name),
            }
            times: dict[str, list[float]] = {side: [] for side in sides}
            for number in range(-1, rounds):
                for side in sorted(sides, reverse=number % 2 == 0):
                    taken = start(made, sides[side])
                    if number >= 0:
                        times[side].append(taken)
            ratio = median(ratios(times["plugin"], times["plain"]))
            took = ", ".join(f"{side} {median(all_):.1f} s" for side, all_ in times.items())
            what = f"start to ready, {nbytes} of weights, plugin over plain"
            rows.append(Row(what, ratio, "at most", BOUND, took))
            raw.update({f"{side}, {nbytes}": all_ for side, all_ in times.items()})
    return Section(tuple(rows), raw)


def start(made: Scene, arguments: Mapping[str, object]) -> float:
    """Seconds until the engine was ready; then it is ended."""
    began = time.perf_counter()
    (engine,) = made.start(arguments)
    taken = time.perf_counter() - began
    engine.close()
    return taken
