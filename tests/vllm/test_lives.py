"""Real engines that start without a daemon, and outlive theirs."""

from collections.abc import Mapping

import pytest

from tests.guarantees.harness import Daemon
from tests.vllm.engines import (
    MIB,
    REQUESTS,
    TOKENS,
    EngineFailed,
    Scene,
    await_registered,
    on_swapd,
)

Expected = Mapping[str, list[list[list[int]]]]


def waits(daemon: Daemon, name: str) -> int:
    """How often a request for this component has had to wait until now."""
    return sum(one.names == (name,) for one in daemon.watch.seen("Waiting"))


def await_another(daemon: Daemon, name: str, waited: int) -> None:
    for _ in range(waited + 1):
        daemon.await_record("Waiting", names=(name,))


def test_without_a_daemon_the_start_fails_with_the_command_to_run(scene: Scene) -> None:
    engine = scene.process("thinker")
    with pytest.raises(EngineFailed) as failed:
        engine.start(**on_swapd(scene.models / "thinker", scene.folder / "nobody"))
    assert failed.value.kind == "NotRunning"
    assert "swapd serve" in failed.value.message
    assert "thinker" in failed.value.message


def test_a_cell_whose_engine_did_not_start_may_run_again(scene: Scene, expected: Expected) -> None:
    """vLLM finds that the cache holds no request when the weights are in swapd already."""
    daemon = scene.daemon()
    engine = scene.process("thinker")
    arguments = on_swapd(scene.models / "thinker", daemon.folder, {"kv": "auto"})
    with pytest.raises(EngineFailed, match="No available memory for the cache blocks"):
        engine.start(**{**arguments, "kv_cache_memory_bytes": 4096})
    engine.start(**{**arguments, "kv_cache_memory_bytes": 8 * MIB})
    assert engine.generate(REQUESTS[0], TOKENS) == expected["thinker"][0]


def test_a_daemon_that_dies_stops_nobody_and_after_its_restart_they_take_turns_again(
    scene: Scene, expected: Expected
) -> None:
    """One is in a request as it dies, and one waits. The one lost daemon is followed by another."""
    daemon = scene.daemon()
    thinker, talker = scene.on_swapd(daemon, "thinker", "talker")
    for _ in range(2):
        thinker.ask(REQUESTS[0], TOKENS)
        thinker.step(3)
        waited = waits(daemon, "talker")
        talker.begin("generate", REQUESTS[0], TOKENS)
        await_another(daemon, "talker", waited)
        daemon.kill()
        assert talker.result() == expected["talker"][0]
        assert thinker.finish() == expected["thinker"][0], "it was in a request"
        for engine in (thinker, talker):
            assert engine.generate(REQUESTS[1], TOKENS) == expected[engine.label][1]
            assert "goes on without swapd" in engine.log
        daemon = scene.daemon_again(daemon)
        await_registered(daemon, "thinker", "talker")
        for engine in (thinker, talker, thinker):
            assert engine.generate(REQUESTS[2], TOKENS) == expected[engine.label][2]
            assert f"{engine.label} is back in swapd at {daemon.folder}" in engine.log
        status = daemon.status()
        assert status.evictions > 0
        assert status.bytes_out == 0
