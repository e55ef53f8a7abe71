"""Decode steps of a stage whose layers stream, where a layer's copy takes as long as its compute.

The layers are held by the clock (`held.py`), and the bus of the host device is as slow as that.
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.vllm.rows import Row, Section, median
from tests.vllm.engines import MIB, Engine, Nursery, on_swapd, scene

HELD = "benchmarks.vllm.held"
#: Of `held`, which is of vLLM and not imported here.
LAYER_S = 0.010
#: `deep`: its layers, and the bytes that each takes in chunks.
LAYERS, LAYER = 24, 6 * MIB
PROMPTS = [[5, 6, 7, 8]]


class Side(NamedTuple):
    """One engine: its options of swapd, the parts that stream, and the bound of its steps."""

    what: str
    options: dict[str, Any]
    streamed: int
    bound: float | None


RESIDENT = Side("all resident, without the option", {}, 0, None)
SIDES = (
    Side("all resident, with resident: auto", {"resident": "auto"}, 0, 1.005),
    Side("half of the layers streamed", {"offload_group_size": 2}, LAYERS // 2, 1.02),
    Side("all streamed, three in the window", {"enable_layerwise_offload": True}, LAYERS, 1.05),
)


def measure(models: Path, nursery: Nursery, rounds: int) -> Section:
    """Steps of each side, all in turn; over the longer of compute and copy.

    Compute is a step of the engine with everything resident, and the copy is what the bus takes at
    its nominal speed for the layers that pass it.
    """
    sides = (RESIDENT, *SIDES)
    with scene(models, nursery) as made:
        budget, rate = 4 * (LAYERS + 6) * LAYER, int(LAYER / LAYER_S)
        daemons = [made.daemon(budget=budget, bandwidth=rate) for _ in sides]
        engines = []
        for side, daemon in zip(sides, daemons, strict=True):
            of_it = {"load_workspace": 0, **side.options}
            (engine,) = made.start(on_swapd(models / "deep", daemon.folder, of_it), imports=HELD)
            engines.append(engine)
        taken = [[_step_s(engine) for engine in engines] for _ in range(rounds)]
    by_side = {side.what: [one[i] for one in taken] for i, side in enumerate(sides)}
    compute = median(by_side[RESIDENT.what])
    rows = [
        Row(
            f"a decode step over the longer of compute and copy, {side.what}",
            median(by_side[side.what]) / max(compute, side.streamed * LAYER_S),
            "at most",
            side.bound,
            f"{1e3 * median(by_side[side.what]):.1f} ms; compute {1e3 * compute:.1f} ms",
        )
        for side in SIDES
    ]
    return Section(tuple(rows), by_side)


def _step_s(engine: Engine, steps: int = 12) -> float:
    """The median of the steps of one request, without those that begin it."""
    engine.ask(PROMPTS, steps + 4)
    engine.step(3)
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step(1)
        taken.append(time.perf_counter() - began)
    engine.finish()
    return median(taken)
