"""KV caches that take turns with the weights: engines whose caches do not fit together answer as
plain vLLM does, token for token, and no more is copied than is worth saving.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from swapd.core import actions
from tests.guarantees.harness import Daemon
from tests.vllm import engines
from tests.vllm.engines import (
    MIB,
    PATIENT,
    Nursery,
    Scene,
    by_component,
    on_swapd,
    plain,
    rounds_until,
)

NAMES = ("thinker", "talker")
CACHES = {f"{name}.kv" for name in NAMES}
#: The KV cache of each stage, beside some 50 MiB of weights.
CACHE = 32 * MIB
#: Room for one stage with its cache, and no more.
BUDGET = "96MiB"

#: Each prompt twice, with a beginning that several share, which prefix caching finds.
PROMPTS = [[[*range(40, 80), 100 + i, 7], [9, 10 + i]] for i in (0, 1) for _ in (0, 1)]
#: One at a time. The last bits of sums, and so the answers of plain vLLM, depend on the batch, and
#: that on the time at which requests reach an engine that has a process of its own.
ALONE = [[prompts[0]] for prompts in PROMPTS]
TOKENS = 10

#: Requests that last for several slices, which are longer than the daemon's quantum.
LONG, LONG_TOKENS = PROMPTS[:3], 96
SLICE_S = 0.2

Said = Mapping[str, list[list[list[int]]]]


def options(*, prefixes: bool) -> dict[str, object]:
    return {"kv_cache_memory_bytes": CACHE, "enable_prefix_caching": prefixes}


class Answers(NamedTuple):
    """The answers of plain vLLM, by model."""

    prompts: Said
    long: Said


@pytest.fixture(scope="module")
def answers(models: Path, nursery: Nursery) -> Answers:
    with engines.scene(models, nursery) as made:
        started = made.start(
            *(plain(made.models / name, **options(prefixes=False)) for name in NAMES)
        )
        asked = (PROMPTS, TOKENS), (LONG, LONG_TOKENS)
        return Answers(
            *(
                {one.label: [one.generate(few, tokens) for few in prompts] for one in started}
                for prompts, tokens in asked
            )
        )


def serve(
    scene: Scene,
    daemon: Daemon,
    kv: str,
    *,
    expected: Said,
    prefixes: bool,
    seen: Callable[[], bool] = lambda: True,
    what: str = "both engines took turns",
    finish_within_s: float | None = None,
    slice_s: float | None = None,
    prompts: list[list[list[int]]] = PROMPTS,
    tokens: int = TOKENS,
    multiprocessing: bool = False,
    imports: str = "",
    **more: object,
) -> None:
    """Have both engines busy at once until they took turns, and `seen()`, which says `what`.

    In every round they say what is expected.
    """
    turns = {"finish_within_s": finish_within_s, "slice_s": slice_s}
    settings = {"kv": kv, **turns}
    of_engine = {**options(prefixes=prefixes), "async_scheduling": False, **more}
    both = scene.start(
        *(on_swapd(scene.models / name, daemon.folder, settings, **of_engine) for name in NAMES),
        multiprocessing=multiprocessing,
        imports=imports,
    )
    before = daemon.status()

    def took_turns() -> bool:
        return daemon.status().evictions > before.evictions

    for number in rounds_until(lambda: took_turns() and seen(), what):
        for engine in both * number:
            engine.begin("serve", prompts, tokens)
            engine.begin("rest")
            engine.begin("forget_prefixes")
        for engine in both * number:
            assert [got for got, *_ in engine.result()] == expected[engine.label]
            engine.result()
            engine.result()
    status = daemon.status()
    assert status.peak_bytes <= status.budget_bytes < sum(c.nbytes for c in status.components)
    kinds = {name: {one.kind for one in parts} for name, parts in by_component(daemon).items()}
    assert kinds == {
        "thinker": {"component"},
        "thinker.kv": {"scratch"},
        "talker": {"component"},
        "talker.kv": {"scratch"},
    }


def copied_out(daemon: Daemon) -> dict[str, int]:
    """The bytes that were saved, by component."""
    found: dict[str, int] = {}
    for order in daemon.watch.seen("CopyOut"):
        nbytes = order.nbytes if order.only is None else sum(n for _, n in order.only)
        found[order.name] = found.get(order.name, 0) + nbytes
    return found


def test_what_requests_in_flight_have_is_saved_when_a_turn_ends_inside_of_them(
    scene: Scene, answers: Answers
) -> None:
    daemon = scene.daemon(budget=BUDGET, residency_factor=0.5, residency_bound=0.5)
    serve(
        scene,
        daemon,
        "auto",
        expected=answers.prompts,
        prefixes=False,
        seen=lambda: copied_out(daemon).keys() == CACHES,
        what="a turn of each ended inside of requests, so that its cache was saved",
        finish_within_s=0,
    )
    saved = copied_out(daemon)
    times = len(daemon.watch.seen("CopyOut"))
    assert sum(saved.values()) < times * CACHE / 4, "the blocks in use, not all of it"


def lasted_s(daemon: Daemon) -> dict[str, list[float]]:
    """The seconds of each turn that ended inside requests, by the cache that was saved."""
    daemon.watch.seen("CopyOut")  # reads all records until now
    began: dict[str, float] = {}
    found: dict[str, list[float]] = {f"{name}.kv": [] for name in NAMES}
    for record in daemon.watch.history:
        match record.action:
            case actions.Grant(placements=placements, loaded=True):
                began |= {one.name: record.time for one in placements}
            case actions.CopyOut(name=name):
                found[name].append(record.time - began[name])
    return found


def test_two_busy_stages_share_by_slices_of_the_length_that_is_stated(
    scene: Scene, answers: Answers
) -> None:
    daemon = scene.daemon(budget=BUDGET, residency_factor=0.5, residency_bound=SLICE_S / 10)
    serve(
        scene,
        daemon,
        "auto",
        expected=answers.long,
        prefixes=False,
        seen=lambda: min(map(len, lasted_s(daemon).values())) >= 2,
        what="two turns of each ended inside of requests",
        slice_s=SLICE_S,
        prompts=LONG,
        tokens=LONG_TOKENS,
        imports=PATIENT,
    )
    assert min(map(min, lasted_s(daemon).values())) >= SLICE_S
