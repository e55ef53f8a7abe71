"""KV caches whose contents are gone: dropped, or not saved. Requests are computed again, none is
lost, and engines answer as plain vLLM does, token for token.

Computing again uses other batches, of all tokens at once: so these tests have one prompt a request,
and numbers whose last bits decide no token.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import swapd_client
from tests.guarantees.harness import Daemon
from tests.guarantees.held_save import door
from tests.vllm import engines
from tests.vllm.engines import (
    EngineFailed,
    Nursery,
    Scene,
    await_components,
    on_swapd,
    plain,
    rounds_until,
)
from tests.vllm.test_kv import ALONE, CACHES, NAMES, TOKENS, Said, serve
from tests.vllm.test_kv import options as of_cache

HEARS = "swapd_client.vllm.scheduler.Scheduler"
FAILING = "tests.guarantees.failing_saves"
HELD = "tests.guarantees.held_save"
#: Options of an engine with vLLM's own scheduler; a request has several such blocks.
BY_BLOCKS: Mapping[str, Any] = {"block_size": 32}
#: An option with which that one does not learn of losses.
DEAF: Mapping[str, Any] = {"long_prefill_token_threshold": 8}
#: The number of sets that keeps an engine busy until its cache is taken.
SETS = 4
LONG_TOKENS = 200
#: Room for one stage with its cache, and no more.
BUDGET = "160MiB"


def options(*, prefixes: bool) -> dict[str, object]:
    return {"dtype": "float32", **of_cache(prefixes=prefixes)}


@pytest.fixture(scope="module")
def alone(models: Path, nursery: Nursery) -> Iterator[Said]:
    with engines.scene(models, nursery) as made:
        started = made.start(
            *(plain(made.models / name, **options(prefixes=False)) for name in NAMES)
        )
        yield {one.label: [one.generate(few, TOKENS) for few in ALONE] for one in started}


def names(daemon: Daemon, kind: str) -> set[str]:
    """The components with records of this kind until now."""
    return {record.name for record in daemon.watch.seen(kind)}


def daemon_that_loses(scene: Scene) -> Daemon:
    """Every third save fails; turns are short, and end inside of requests."""
    return scene.daemon(budget=BUDGET, program=FAILING, residency_factor=0.5, residency_bound=0.5)


@pytest.mark.parametrize(
    ("apart", "more", "prefixes"),
    [(False, {}, True), (True, {"scheduler_cls": HEARS}, False), (True, BY_BLOCKS, True)],
    ids=["one process", "several", "several, and vLLM's own scheduler"],
)
def test_what_could_not_be_saved_is_computed_again(
    scene: Scene, alone: Said, *, apart: bool, more: Mapping[str, Any], prefixes: bool
) -> None:
    daemon = daemon_that_loses(scene)
    serve(
        scene,
        daemon,
        "auto",
        expected=alone,
        prefixes=prefixes,
        seen=lambda: names(daemon, "Lost") == CACHES and bool(daemon.watch.seen("CopiedOut")),
        what="a cache of each could not be saved, and another was",
        finish_within_s=0,
        prompts=ALONE,
        multiprocessing=apart,
        dtype="float32",
        **more,
    )


def test_a_dropped_cache_has_no_prefixes_any_more(scene: Scene, alone: Said) -> None:
    """With vLLM's own scheduler; `test_kv_features.py` has swapd's."""
    daemon = scene.daemon(budget=BUDGET, residency_factor=0.5, residency_bound=0.5)
    serve(
        scene,
        daemon,
        "drop",
        expected=alone,
        prefixes=True,
        finish_within_s=0,
        prompts=ALONE,
        multiprocessing=True,
        dtype="float32",
        **BY_BLOCKS,
    )
    assert daemon.status().bytes_out == 0


def lose(daemon: Daemon, budget: str = BUDGET) -> None:
    """Have the save of an evicted cache fail, then kill the daemon; blocks until both are done.

    `budget`: that of the daemon.
    """
    with swapd_client.connect(daemon.folder, label="taker") as taker:
        while daemon.running:  # until it has contents to save
            with taker.acquire_workspace(budget):
                if daemon.watch.seen("Lost"):
                    daemon.kill()


def test_what_could_not_be_saved_is_computed_again_where_the_daemon_dies_next(
    scene: Scene, alone: Said
) -> None:
    """Its host copy has only half of the contents then."""
    daemon = scene.daemon(budget=BUDGET, program=FAILING, residency_factor=0)
    settings = {"kv": "auto", "finish_within_s": 0}
    (engine,) = scene.start(
        on_swapd(scene.models / "thinker", daemon.folder, settings, **options(prefixes=True))
    )
    engine.ask(ALONE[0], TOKENS)
    engine.step(5)
    lose(daemon)
    assert [engine.finish()] == alone["thinker"][:1]
    assert [engine.generate(few, TOKENS) for few in ALONE] == alone["thinker"]
    assert "goes on without swapd" in engine.log


def test_vllms_own_scheduler_computes_it_again_where_the_daemon_dies_next(
    scene: Scene, alone: Said
) -> None:
    daemon = scene.daemon(budget=BUDGET, program=FAILING, residency_factor=0)
    settings = {"kv": "auto", "finish_within_s": 0}
    of_engine = {**options(prefixes=True), **BY_BLOCKS}
    (engine,) = scene.start(
        on_swapd(scene.models / "thinker", daemon.folder, settings, **of_engine),
        multiprocessing=True,
    )
    for _ in range(SETS):
        engine.begin("serve", ALONE, TOKENS)
    lose(daemon)
    for _ in range(SETS):
        assert [tokens for tokens, *_ in engine.result()] == alone["thinker"]
    assert "goes on without swapd" in engine.log
    assert "request(s) rescheduled" in engine.log, "it was told of blocks that are gone"


def test_a_loss_that_no_scheduler_hears_of_ends_the_stage_though_the_daemon_dies_next(
    scene: Scene,
) -> None:
    daemon = scene.daemon(budget=BUDGET, program=FAILING, residency_factor=0)
    settings = {"kv": "auto", "finish_within_s": 0}
    of_engine = {**options(prefixes=False), **DEAF}
    (engine,) = scene.start(
        on_swapd(scene.models / "thinker", daemon.folder, settings, **of_engine),
        multiprocessing=True,
    )
    engine.begin("serve", ALONE * SETS, LONG_TOKENS)
    lose(daemon)
    with pytest.raises(EngineFailed):
        engine.result()
    at_its_start, *_ = engine.log.split("CacheLost")
    assert "ends the stage: to have them computed again, set scheduler_cls" in at_its_start
    assert "CacheLost" in engine.log
    assert f"set scheduler_cls: {HEARS}" in engine.log


def test_a_cache_that_is_dropped_is_refused_where_its_scheduler_would_not_hear(
    scene: Scene,
) -> None:
    daemon = scene.daemon(budget=BUDGET)
    stage = scene.process("thinker", multiprocessing=True)
    stage.fork_workers()
    with pytest.raises(EngineFailed):
        stage.start(
            **on_swapd(
                scene.models / "thinker",
                daemon.folder,
                {"kv": "drop"},
                **options(prefixes=True),
                **DEAF,
            )
        )
    assert f"set scheduler_cls: {HEARS}; or enable_prefix_caching: false" in stage.log


def test_a_stage_killed_while_its_cache_is_saved_costs_the_others_nothing(
    scene: Scene, alone: Said
) -> None:
    os.mkfifo(door(scene.folder / "d0"))
    daemon = scene.daemon(budget=BUDGET, program=HELD, residency_factor=0.5, residency_bound=0.5)
    settings = {"kv": "auto", "finish_within_s": 0}

    def arguments(name: str) -> dict[str, object]:
        return on_swapd(scene.models / name, daemon.folder, settings, **options(prefixes=False))

    both = {engine.label: engine for engine in scene.start(*map(arguments, NAMES))}
    for engine in both.values():  # a turn of one of them ends inside of a request
        engine.begin("serve", ALONE * SETS, TOKENS)
    save = daemon.await_record("CopyOut")
    stage, _ = save.name.split(".")
    victim = both.pop(stage)
    victim.kill()
    os.close(os.open(door(daemon.folder), os.O_WRONLY))
    (other,) = both.values()
    assert [tokens for tokens, *_ in other.result()] == alone[other.label] * SETS
    await_components(daemon, other.label, f"{other.label}.kv")
    (again,) = scene.start(arguments(stage))
    for number in rounds_until(
        lambda: names(daemon, "CopyOut") == CACHES, "a cache of each was saved"
    ):
        for engine in (again, other) * number:
            engine.begin("serve", ALONE, TOKENS)
        for engine in (again, other) * number:
            assert [tokens for tokens, *_ in engine.result()] == alone[engine.label]
    assert daemon.status().quarantined_bytes == 0
