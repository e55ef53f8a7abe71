"""Engines of two ranks: each rank's weights are with the daemon of its own device.

`test_pipeline_parallel.py` has more about pipelines.
"""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import swapd_client
from tests.guarantees.harness import Daemon
from tests.vllm import engines
from tests.vllm.engines import (
    REQUESTS,
    TOKENS,
    Engine,
    EngineDied,
    EngineFailed,
    Nursery,
    Scene,
    by_component,
    on_swapd,
    plain,
    rounds_until,
)
from tests.vllm.test_kv import ALONE
from tests.vllm.test_kv import options as of_cache
from tests.vllm.test_kv_features import RUNNING_AHEAD
from tests.vllm.test_kv_lost import BUDGET, BY_BLOCKS, DEAF, FAILING, HEARS, lose

NAMES = ("thinker", "talker")
RANKS = 2

#: A daemon's budget: room for one rank, and for its loading; each stage has a rank there.
ROOM_FOR_ONE = "44MiB"

HEARS_AHEAD = "swapd_client.vllm.scheduler.AsyncScheduler"
#: How often a rank loses its KV cache.
LOSSES = 3
#: Options of an engine whose KV cache takes turns.
OF_CACHE: Mapping[str, Any] = {
    "dtype": "float32",
    "tensor_parallel_size": RANKS,
    **of_cache(prefixes=False),
}
#: Of one whose ranks are a pipeline instead, with several parts of a prompt in flight.
PIPELINE: Mapping[str, Any] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": RANKS,
    "max_num_batched_tokens": 8,
    "enable_chunked_prefill": True,
}


def serve(engines: Sequence[Engine]) -> list[list[list[list[int]]]]:
    """The answers of each to all requests, while the others answer as well."""
    for engine in engines:
        engine.begin("serve", REQUESTS, TOKENS)
    return [[answer for answer, _, _ in engine.result()] for engine in engines]


def test_two_stages_of_two_ranks_take_turns_on_two_devices(scene: Scene) -> None:
    """With the tokens of plain vLLM; and when a rank of one is killed, the other goes on."""
    expected = []
    for name in NAMES:  # one at a time: ranks wait for each other by computing
        (without,) = scene.start(plain(scene.models / name, tensor_parallel_size=RANKS))
        expected += serve([without])
        without.close()

    daemons = [scene.daemon(budget=ROOM_FOR_ONE) for _ in range(RANKS)]
    pattern = daemons[0].folder.with_name("d{gpu}")
    thinker, talker = scene.start(
        *(on_swapd(scene.models / name, pattern, tensor_parallel_size=RANKS) for name in NAMES),
    )
    for rank, daemon in enumerate(daemons):
        assert by_component(daemon).keys() == {f"{name}.tp{rank}" for name in NAMES}
    before = [daemon.status().evictions for daemon in daemons]
    assert serve([thinker, talker]) == expected
    for daemon, evictions in zip(daemons, before, strict=True):
        status = daemon.status()
        assert status.evictions > evictions, "they did not get into each other's way"
        assert status.bytes_out == 0

    thinker.ask(REQUESTS[0], TOKENS)
    thinker.step(2)  # it has not finished, so it keeps its memory
    talker.begin("serve", REQUESTS, TOKENS)
    os.kill(thinker.children()[0], signal.SIGKILL)
    with pytest.raises((EngineFailed, EngineDied)):
        thinker.finish()
    assert [answer for answer, _, _ in talker.result()] == expected[1]


def lose_often(
    daemon: Daemon, engine: Engine, requests: Sequence[Sequence[Sequence[int]]]
) -> Iterator[list[list[list[int]]]]:
    """Take all memory of a daemon while an engine serves, until several saves have failed; the
    engine's answers, of each round."""

    def often() -> bool:
        return len(daemon.watch.seen("Lost")) >= LOSSES

    with swapd_client.connect(daemon.folder, label="taker") as taker:
        for _ in rounds_until(often, f"{LOSSES} saves fail"):
            engine.begin("serve", requests, TOKENS)
            while not (engine.has_answered() or often()):
                with taker.acquire_workspace(BUDGET):
                    pass
            yield [tokens for tokens, *_ in engine.result()]


@pytest.fixture(scope="module")
def alone(models: Path, nursery: Nursery) -> Iterator[list[list[list[int]]]]:
    """The answers of an engine of two ranks to `ALONE` without swapd."""
    with engines.scene(models, nursery) as made:
        one = made.process("thinker")
        one.fork_workers()
        one.start(**plain(made.models / "thinker", **OF_CACHE))
        yield [one.generate(few, TOKENS) for few in ALONE]


@pytest.mark.parametrize(
    ("more", "loser"),
    [
        ({"scheduler_cls": HEARS}, 0),
        ({"scheduler_cls": HEARS_AHEAD, "async_scheduling": True}, 1),
        (BY_BLOCKS, 1),
        ({"scheduler_cls": HEARS, **PIPELINE}, 0),
        ({"scheduler_cls": HEARS, **PIPELINE}, 1),
    ],
    ids=["by number", "by number, async", "by blocks", "pipeline, rank 0", "pipeline, rank 1"],
)
def test_what_one_rank_could_not_save_is_computed_again_by_all(
    scene: Scene, alone: list[list[list[int]]], more: Mapping[str, Any], loser: int
) -> None:
    """The rank may be the one that vLLM listens to, the first one or the last of a pipeline, or
    another."""
    programs = {loser: {"program": FAILING}}
    daemons = [
        scene.daemon(budget=BUDGET, residency_factor=0, **programs.get(rank, {}))
        for rank in range(RANKS)
    ]
    settings = {"kv": "auto", "finish_within_s": 0}
    of_engine = {**OF_CACHE, "enable_prefix_caching": True, **more}
    (engine,) = scene.start(
        on_swapd(
            scene.models / "thinker",
            daemons[0].folder.with_name("d{gpu}"),
            settings,
            **of_engine,
        ),
        imports=RUNNING_AHEAD if "async_scheduling" in more else "",
    )
    for answers in lose_often(daemons[loser], engine, ALONE):
        assert answers == alone
    lost = [{record.name for record in daemon.watch.seen("Lost")} for daemon in daemons]
    assert lost == [{f"thinker.tp{rank}.kv"} if rank == loser else set() for rank in range(RANKS)]


@pytest.mark.parametrize(("more", "loser"), [(DEAF, 1), (PIPELINE, 0)], ids=["deaf", "pipeline"])
def test_a_rank_whose_kv_cache_is_gone_ends_the_stage_where_no_scheduler_hears_of_it(
    scene: Scene, more: Mapping[str, Any], loser: int
) -> None:
    """The other has its own, and would wait for it in the midst of a step. vLLM's own scheduler
    cannot undo the steps of a pipeline that are in flight."""
    failing = {"program": FAILING, "residency_factor": 0}
    daemons = [
        scene.daemon(budget=BUDGET, **(failing if rank == loser else {})) for rank in range(RANKS)
    ]
    pattern = daemons[0].folder.with_name("d{gpu}")
    settings = {"kv": "auto", "finish_within_s": 0}
    model = scene.models / "thinker"
    (thinker,) = scene.start(on_swapd(model, pattern, settings, **{**OF_CACHE, **more}))
    thinker.begin("serve", REQUESTS * 4, 200)  # it is still at them when the save fails
    lose(daemons[loser])
    with pytest.raises((EngineFailed, EngineDied)):
        thinker.result()
    assert f"rank {loser} of thinker.tp{loser} ends: CacheLost" in thinker.log
    assert f"set scheduler_cls: {HEARS}" in thinker.log
