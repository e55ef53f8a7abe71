"""KV caches whose contents are gone: dropped, or not saved. Requests are computed again, none is
lost, and engines say what plain vLLM says, token for token.

What is computed again is computed in other batches, of all tokens at once: so one prompt a request,
and numbers whose last bits decide no token.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.guarantees.harness import Daemon
from tests.guarantees.held_save import door
from tests.vllm import engines
from tests.vllm.engines import EngineFailed, Nursery, Scene, await_components, on_swapd, plain
from tests.vllm.test_kv import ALONE, NAMES, TOKENS, Said, serve
from tests.vllm.test_kv import options as of_cache

HEARS = "swapd_client.vllm.scheduler.Scheduler"
FAILING = "tests.guarantees.failing_saves"
HELD = "tests.guarantees.held_save"
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


def daemon_that_loses(scene: Scene) -> Daemon:
    """Every third save fails; turns are short, and end inside of requests."""
    return scene.daemon(budget=BUDGET, program=FAILING, residency_factor=0.5, residency_bound=0.5)


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["one process", "several"])
def test_what_could_not_be_saved_is_computed_again(
    scene: Scene, alone: Said, *, apart: bool, prefixes: bool
) -> None:
    daemon = daemon_that_loses(scene)
    more = {"scheduler_cls": HEARS} if apart else {}
    said = serve(
        scene,
        daemon,
        "auto",
        prefixes=prefixes,
        finish_within_s=0,
        prompts=ALONE,
        multiprocessing=apart,
        dtype="float32",
        **more,
    )
    assert said == alone
    assert {record.name for record in daemon.watch.seen("Lost")} == {"thinker.kv", "talker.kv"}
    assert len(daemon.watch.seen("CopiedOut")) > 0, "the others were saved"


def test_a_dropped_cache_has_no_prefixes_any_more(scene: Scene, alone: Said) -> None:
    daemon = scene.daemon(budget=BUDGET, residency_factor=0.5, residency_bound=0.5)
    said = serve(
        scene,
        daemon,
        "drop",
        prefixes=True,
        finish_within_s=0,
        prompts=ALONE,
        multiprocessing=True,
        dtype="float32",
        scheduler_cls=HEARS,
    )
    assert said == alone
    assert daemon.status().bytes_out == 0


def test_a_loss_that_no_scheduler_hears_of_ends_the_stage_and_it_is_said_what_to_set(
    scene: Scene,
) -> None:
    daemon = daemon_that_loses(scene)
    settings = {"kv": "auto", "finish_within_s": 0}
    both = scene.start(
        *(
            on_swapd(scene.models / name, daemon.folder, settings, **options(prefixes=False))
            for name in NAMES
        ),
        multiprocessing=True,
    )
    for engine in both:
        engine.begin("serve", ALONE, TOKENS)
    failed = []
    for engine in both:
        with suppress(EngineFailed):
            engine.result()
            continue
        failed.append(engine)
    assert failed
    for engine in failed:
        assert "CacheLost" in engine.log
        assert f"set scheduler_cls: {HEARS}" in engine.log


def test_a_cache_that_is_dropped_is_refused_where_its_scheduler_would_not_hear(
    scene: Scene,
) -> None:
    daemon = scene.daemon(budget=BUDGET)
    stage = scene.process("thinker", multiprocessing=True)
    with pytest.raises(EngineFailed):
        stage.start(
            **on_swapd(
                scene.models / "thinker", daemon.folder, {"kv": "drop"}, **options(prefixes=True)
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
    for engine in both.values():
        engine.begin("serve", ALONE, TOKENS)
    save = daemon.await_record("CopyOut")
    stage, _ = save.name.split(".")
    victim = both.pop(stage)
    victim.kill()
    os.close(os.open(door(daemon.folder), os.O_WRONLY))
    (other,) = both.values()
    assert [tokens for tokens, *_ in other.result()] == alone[other.label]
    await_components(daemon, other.label, f"{other.label}.kv")
    (again,) = scene.start(arguments(stage))
    for engine in (again, other):
        engine.begin("serve", ALONE, TOKENS)
    for engine in (again, other):
        assert [tokens for tokens, *_ in engine.result()] == alone[engine.label]
    saved = {order.name for order in daemon.watch.seen("CopyOut")}
    assert saved == {f"{name}.kv" for name in NAMES}
    assert daemon.status().quarantined_bytes == 0
