"""A stage that starts again, to its first token: its weights kept by the daemon, or read.

The files are in the page cache, and vLLM is imported.
"""

import time
from pathlib import Path

from benchmarks.vllm.rows import REQUESTS, Row, Section, median, ratios
from tests.guarantees.harness import Daemon
from tests.vllm.engines import Nursery, Scene, on_swapd, scene

#: Bounds on what a restart that finds its weights takes more than one without weights, and on the
#: weights' part of it; both over the weights' part of a restart that reads them.
WHOLE, PART = 0.5, 0.1

MODEL, NBYTES = "heavy", "1.1 GiB"


def measure(models: Path, nursery: Nursery, rounds: int) -> Section:
    """The first restart of each side is not counted."""
    times: dict[str, list[float]] = {"read": [], "kept": []}
    parts: dict[str, list[float]] = {"read": [], "kept": []}
    with scene(models, nursery) as made:
        daemon = made.daemon(budget="1.5GiB", keep_host="1.5GiB", isolation="relaxed")
        for number in range(-1, rounds):
            daemon.observer.forget()
            for side in ("read", "kept"):
                taken, part = restart(made, daemon)
                if number >= 0:
                    times[side].append(taken)
                    parts[side].append(part)
    alone = [t - part for t, part in zip(times["read"], parts["read"], strict=True)]
    more = [t - rest for t, rest in zip(times["kept"], alone, strict=True)]
    took = ", ".join(f"{side} {median(all_):.2f} s" for side, all_ in times.items())
    parts_took = ", ".join(f"{side} {median(all_):.3f} s" for side, all_ in parts.items())
    of = f"a restart, {NBYTES} of weights kept:"
    rows = (
        Row(
            f"{of} to its first token beyond one without weights, over reading them",
            median(more) / median(parts["read"]),
            *("at most", WHOLE, took),
        ),
        Row(
            f"{of} the weights' part, over reading them",
            median(ratios(parts["kept"], parts["read"])),
            *("at most", PART, parts_took),
        ),
    )
    raw = {f"{side}, to the first token": all_ for side, all_ in times.items()}
    return Section(rows, raw | {f"{side}, weights": all_ for side, all_ in parts.items()})


def restart(made: Scene, daemon: Daemon) -> tuple[float, float]:
    """Seconds to the first token, and the weights' part; then the engine is ended."""
    arguments = on_swapd(made.models / MODEL, daemon.folder, worker_cls="tests.vllm.timing.Worker")
    began = time.perf_counter()
    (engine,) = made.start(arguments)
    engine.generate(REQUESTS[0], 1)
    taken = time.perf_counter() - began
    (part,) = engine.call("weights_s")
    engine.close()
    while daemon.status().components:
        daemon.await_record("SessionGone")
    return taken, part
