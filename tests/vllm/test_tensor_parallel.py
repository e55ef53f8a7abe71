"""Engines of two ranks: each rank's weights are at the daemon of its own device."""

import os
import signal
from collections.abc import Sequence

import pytest

from tests.vllm.engines import (
    MIB,
    REQUESTS,
    TOKENS,
    Engine,
    EngineDied,
    EngineFailed,
    Scene,
    by_component,
    on_swapd,
    plain,
)
from tests.vllm.test_kv_lost import BUDGET, FAILING, lose

NAMES = ("thinker", "talker")
RANKS = 2

#: For a daemon that has one rank of each: room for one of them, and for its loading.
ROOM_FOR_ONE = "44MiB"


def serve(engines: Sequence[Engine]) -> list[list[list[list[int]]]]:
    """What each answers to all requests, while the others do as well."""
    for engine in engines:
        engine.begin("serve", REQUESTS, TOKENS)
    return [[answer for answer, _, _ in engine.result()] for engine in engines]


def test_two_stages_of_two_ranks_take_turns_on_two_devices(scene: Scene) -> None:
    """With the tokens of plain vLLM; and when a rank of one is killed, the other goes on."""
    expected = []
    for name in NAMES:  # one at a time: ranks wait for each other by computing
        without = scene.process(name)
        without.fork_workers()  # those below spawn theirs, as vLLM does
        without.start(**plain(scene.models / name, tensor_parallel_size=RANKS))
        expected += serve([without])
        without.close()

    daemons = [scene.daemon(budget=ROOM_FOR_ONE) for _ in range(RANKS)]
    pattern = daemons[0].folder.with_name("d{gpu}")
    thinker, talker = scene.start(
        *(on_swapd(scene.models / name, pattern, tensor_parallel_size=RANKS) for name in NAMES)
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


def test_a_rank_whose_kv_cache_is_gone_ends_the_stage_in_words(scene: Scene) -> None:
    """The other has its own, and would wait for it in the midst of a step."""
    sound = scene.daemon(budget=BUDGET)
    loses = scene.daemon(budget=BUDGET, program=FAILING, residency_factor=0)
    pattern = sound.folder.with_name("d{gpu}")
    cache = {"kv_cache_memory_bytes": 32 * MIB, "enable_prefix_caching": False}
    settings = {"kv": "auto", "finish_within_s": 0}
    model = scene.models / "thinker"
    (thinker,) = scene.start(
        on_swapd(model, pattern, settings, tensor_parallel_size=RANKS, **cache)
    )
    thinker.begin("generate", REQUESTS[0], 200)
    lose(loses)
    with pytest.raises((EngineFailed, EngineDied)):
        thinker.result()
    assert "CacheLost" in thinker.log
    assert "set tensor_parallel_size: 1" in thinker.log
