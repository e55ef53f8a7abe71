"""Engines of two ranks that are a pipeline, with several steps in flight: a daemon for each."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.guarantees.harness import Daemon
from tests.vllm import engines
from tests.vllm.engines import (
    Engine,
    EngineDied,
    EngineFailed,
    Nursery,
    Scene,
    await_registered,
    by_component,
    on_swapd,
    plain,
)

NAMES = ("thinker", "talker")

REQUESTS = [[[*range(30 + n, 60 + n)], [9, 10 + n, 11]] for n in range(4)]
TOKENS = 8
STEP = 8  # tokens, fewer than those of a request
PIPELINE: Mapping[str, Any] = {
    "pipeline_parallel_size": 2,
    "max_num_batched_tokens": STEP,
    "enable_chunked_prefill": True,
    "dtype": "float32",
    "enable_prefix_caching": False,
}
#: A daemon's budget: room for one rank, and for its loading; each stage has a rank there.
ROOM_FOR_ONE = "76MiB"

Said = Mapping[str, list[list[list[int]]]]


@pytest.fixture(scope="module")
def said(models: Path, nursery: Nursery) -> Iterator[Said]:
    """The answers of plain vLLM with the same pipelines, by model."""
    with engines.scene(models, nursery) as made:
        found = {}
        for name in NAMES:  # one at a time: ranks wait for each other by computing
            (one,) = made.start(plain(made.models / name, **PIPELINE))
            found[name] = [one.generate(few, TOKENS) for few in REQUESTS]
            one.close()
        yield found


def at(scene: Scene, name: str, daemons: Sequence[Daemon]) -> Path:
    """The endpoint of a stage with its ranks at these daemons."""
    for rank, daemon in enumerate(daemons):
        (scene.folder / f"{name}-{rank}").symlink_to(daemon.folder)
    return scene.folder / f"{name}-{{gpu}}"


def two(scene: Scene, budget: str = ROOM_FOR_ONE) -> list[Daemon]:
    """Two daemons in the order of leases."""
    made = [scene.daemon(budget=budget) for _ in range(2)]
    return sorted(made, key=lambda daemon: daemon.folder.stat().st_ino)


def serve(engines: Sequence[Engine]) -> Said:
    """The answers of each, while the others answer as well."""
    for engine in engines:
        engine.begin("serve", REQUESTS, TOKENS)
    return {engine.label: [answer for answer, _, _ in engine.result()] for engine in engines}


@pytest.mark.parametrize(
    ("thinker", "talker"),
    [((0, 1), (0, 1)), ((1, 0), (1, 0)), ((0, 1), (1, 0))],
    ids=["in order", "against it", "crosswise"],
)
def test_two_pipelines_take_turns_in_each_order_of_their_daemons(
    scene: Scene, said: Said, thinker: Sequence[int], talker: Sequence[int]
) -> None:
    """With the tokens of plain vLLM; and when a rank of one is killed, the other goes on."""
    daemons = two(scene)
    places = {"thinker": thinker, "talker": talker}
    both = scene.start(
        *(
            on_swapd(
                scene.models / name, at(scene, name, [daemons[n] for n in places[name]]), **PIPELINE
            )
            for name in NAMES
        )
    )
    for number, daemon in enumerate(daemons):
        names = {f"{name}.tp{places[name].index(number)}" for name in NAMES}
        assert by_component(daemon).keys() == names
    before = [daemon.status().evictions for daemon in daemons]
    assert serve(both) == said
    for daemon, evictions in zip(daemons, before, strict=True):
        status = daemon.status()
        assert status.evictions > evictions, "they did not get into each other's way"
        assert status.bytes_out == 0
    for engine in both:
        warned = "the steps of its pipeline do not overlap" in engine.log
        assert warned == (places[engine.label] == (1, 0))

    first, other = both
    first.ask(REQUESTS[0], TOKENS)
    first.step(2)  # it has not finished, so it keeps its memory
    assert first.in_flight() == [STEP], "vLLM has read the first step only"
    other.begin("serve", REQUESTS, TOKENS)
    os.kill(first.children()[0], signal.SIGKILL)
    with pytest.raises((EngineFailed, EngineDied)):
        first.finish()
    assert [answer for answer, _, _ in other.result()] == said["talker"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_a_pipeline_outlives_its_daemon_and_comes_back_to_the_next(
    scene: Scene, said: Said, rank: int
) -> None:
    daemons = two(scene)
    (engine,) = scene.start(on_swapd(scene.models / "thinker", at(scene, "t", daemons), **PIPELINE))
    engine.begin("serve", REQUESTS, TOKENS)
    daemons[rank].kill()
    assert [answer for answer, _, _ in engine.result()] == said["thinker"]
    again = scene.daemon_again(daemons[rank])
    await_registered(again, f"thinker.tp{rank}")
    assert serve([engine]) == {"thinker": said["thinker"]}
    assert f"thinker.tp{rank} is back in swapd" in engine.log


def test_a_pipeline_ends_whose_first_rank_gets_no_memory(scene: Scene) -> None:
    """vLLM listens to the last one, which has its lease already, and would wait for its input."""
    place = at(scene, "t", two(scene)[::-1])
    failing = {"worker_cls": "tests.vllm.failing.Worker", **PIPELINE}
    (thinker,) = scene.start(on_swapd(scene.models / "thinker", place, **failing))
    thinker.call("fail", 0)
    with pytest.raises((EngineFailed, EngineDied)):
        thinker.generate(REQUESTS[0], TOKENS)
    assert "rank 0 of thinker.tp0 ends: Stopped: there is no memory" in thinker.log


def test_ranks_of_a_pipeline_get_new_weights(scene: Scene, said: Said, other: Path) -> None:
    (engine,) = scene.start(
        on_swapd(scene.models / "talker", at(scene, "t", two(scene)), **PIPELINE)
    )
    assert serve([engine])["talker"] == said["talker"]
    engine.call("reload_weights", None, str(other))
    changed = serve([engine])["talker"]
    assert changed != said["talker"]
    engine.call("reload_weights", None, str(scene.models / "talker"))
    assert serve([engine])["talker"] == said["talker"]


def test_ranks_of_a_pipeline_stream_their_own_layers(scene: Scene, deep: Path) -> None:
    (without,) = scene.start(plain(deep / "deep", **PIPELINE))
    expected = [without.generate(prompts, TOKENS) for prompts in REQUESTS]
    without.close()
    daemons = two(scene, budget="128MiB")
    halves = {"offload_group_size": 2}
    (engine,) = scene.start(on_swapd(deep / "deep", at(scene, "d", daemons), halves, **PIPELINE))
    assert serve([engine]) == {"deep": expected}
    for rank, daemon in enumerate(daemons):
        parts = by_component(daemon)[f"deep.tp{rank}.streamed"]
        passing = {int(one.name.rpartition(".")[2]) for one in parts}
        assert passing == {*range(12 * rank + 1, 12 * rank + 13, 2)}
