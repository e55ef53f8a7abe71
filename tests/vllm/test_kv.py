"""KV caches that take turns with the weights: engines whose caches do not fit together say what
plain vLLM says, token for token, and no more is copied than is worth saving.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.guarantees.harness import Daemon
from tests.vllm import engines
from tests.vllm.engines import MIB, EngineFailed, Nursery, Scene, by_component, on_swapd, plain

NAMES = ("thinker", "talker")
#: Of each stage, beside some 50 MiB of weights.
CACHE = 32 * MIB
#: Room for one stage with its cache, and no more.
BUDGET = "96MiB"

#: Each prompt twice, with a beginning that several share: prefixes are found where they are cached.
PROMPTS = [[[*range(40, 80), 100 + i, 7], [9, 10 + i]] for i in range(3) for _ in (0, 1)]
#: One at a time. What plain vLLM says depends, in a bit of a sum here and there, on what else is in
#: the batch, and so on when requests reach an engine that has a process of its own.
ALONE = [[prompts[0]] for prompts in PROMPTS]
TOKENS = 16

Said = Mapping[str, list[list[list[int]]]]


def options(*, prefixes: bool) -> dict[str, object]:
    return {"kv_cache_memory_bytes": CACHE, "enable_prefix_caching": prefixes}


class Answers(NamedTuple):
    """What plain vLLM says, by model."""

    without_prefixes: Said
    with_prefixes: Said
    alone: Said


@pytest.fixture(scope="module")
def answers(models: Path, nursery: Nursery) -> Answers:
    def ask(prompts: list[list[list[int]]], *, prefixes: bool) -> Said:
        with engines.scene(models, nursery) as made:
            started = made.start(
                *(plain(made.models / name, **options(prefixes=prefixes)) for name in NAMES)
            )
            return {one.label: [one.generate(few, TOKENS) for few in prompts] for one in started}

    return Answers(
        ask(PROMPTS, prefixes=False), ask(PROMPTS, prefixes=True), ask(ALONE, prefixes=False)
    )


def serve(
    scene: Scene,
    daemon: Daemon,
    kv: str,
    *,
    prefixes: bool,
    finish_within_s: float,
    prompts: list[list[list[int]]] = PROMPTS,
    multiprocessing: bool = False,
    **more: object,
) -> dict[str, list[list[list[int]]]]:
    """Both engines busy at once; what they said."""
    settings = {"kv": kv, "finish_within_s": finish_within_s}
    both = scene.start(
        *(
            on_swapd(
                scene.models / name, daemon.folder, settings, **options(prefixes=prefixes), **more
            )
            for name in NAMES
        ),
        multiprocessing=multiprocessing,
    )
    before = daemon.status()
    for engine in both:
        engine.begin("serve", prompts, TOKENS)
    said = {engine.label: [tokens for tokens, *_ in engine.result()] for engine in both}
    status = daemon.status()
    assert status.evictions > before.evictions, "they took turns"
    assert status.peak_bytes <= status.budget_bytes < sum(c.nbytes for c in status.components)
    kinds = {name: {one.kind for one in parts} for name, parts in by_component(daemon).items()}
    assert kinds == {
        "thinker": {"component"},
        "thinker.kv": {"scratch"},
        "talker": {"component"},
        "talker.kv": {"scratch"},
    }
    return said


def copied_out(daemon: Daemon) -> dict[str, int]:
    """By component, the bytes that were saved."""
    found: dict[str, int] = {}
    for order in daemon.watch.seen("CopyOut"):
        nbytes = order.nbytes if order.only is None else sum(n for _, n in order.only)
        found[order.name] = found.get(order.name, 0) + nbytes
    return found


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_cache_is_dropped_between_requests_and_nothing_is_copied_out(
    scene: Scene, answers: Answers, *, async_scheduling: bool
) -> None:
    daemon = scene.daemon(budget=BUDGET)
    said = serve(
        scene,
        daemon,
        "drop",
        prefixes=False,
        finish_within_s=10,
        prompts=ALONE,
        multiprocessing=True,
        async_scheduling=async_scheduling,
    )
    assert said == answers.alone
    assert daemon.status().bytes_out == 0


@pytest.mark.parametrize("prefixes", [False, True])
def test_what_requests_in_flight_have_is_saved_when_a_turn_ends_inside_of_them(
    scene: Scene, answers: Answers, *, prefixes: bool
) -> None:
    daemon = scene.daemon(budget=BUDGET, residency_factor=0.5, residency_bound=0.5)
    said = serve(scene, daemon, "auto", prefixes=prefixes, finish_within_s=0)
    assert said == (answers.with_prefixes if prefixes else answers.without_prefixes)
    saved = copied_out(daemon)
    assert set(saved) == {"thinker.kv", "talker.kv"}
    times = len(daemon.watch.seen("CopyOut"))
    assert sum(saved.values()) < times * CACHE / 4, "the blocks in use, not all of it"


def test_prefixes_that_are_cached_are_found_again_after_other_turns(
    scene: Scene, answers: Answers
) -> None:
    daemon = scene.daemon(budget=BUDGET)
    said = serve(scene, daemon, "auto", prefixes=True, finish_within_s=10)
    assert said == answers.with_prefixes
    assert copied_out(daemon)


def test_a_cache_that_does_not_fit_beside_its_weights_is_refused_in_words(scene: Scene) -> None:
    daemon = scene.daemon(budget="64MiB")
    with pytest.raises(EngineFailed) as refused:
        scene.start(
            on_swapd(
                scene.models / "thinker", daemon.folder, {"kv": "auto"}, **options(prefixes=False)
            )
        )
    said = refused.value.message
    assert "stage 'thinker' needs its weights of" in said
    assert "and its KV cache of 32 MiB at once" in said
    assert re.search(
        r"a --budget of \d+MiB at least, or this stage a kv_cache_memory_bytes of", said
    )
