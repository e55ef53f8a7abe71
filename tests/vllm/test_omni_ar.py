"""vllm-omni's own model runner of AR stages, under strict isolation, with room for one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import REQUESTS, TOKENS, Engine, EngineDied, Scene, on_swapd, plain

Expected = Mapping[str, list[list[list[int]]]]

OMNI: dict[str, Any] = {
    "hf_overrides": {"architectures": ["SamplingQwen2"]},
    "distributed_executor_backend": "uni",
    "async_scheduling": False,
}


def process(scene: Scene, name: str) -> Engine:
    engine = scene.process(name)
    engine.imports("tests.vllm.omni_ar")
    return engine


def on_omni(scene: Scene, endpoint: Path, *names: str, worker: str = "ARWorker") -> list[Engine]:
    engines = [process(scene, name) for name in names]
    for name, engine in zip(names, engines, strict=True):
        options = {"worker_cls": f"tests.vllm.omni_ar.{worker}", **OMNI}
        engine.begin("start", **on_swapd(scene.models / name, endpoint, **options))
    for engine in engines:
        engine.result()
    return engines


def test_two_stages_take_turns_and_say_what_plain_vllm_says(
    scene: Scene, expected: Expected
) -> None:
    daemon = scene.daemon()
    engines = on_omni(scene, daemon.folder, "thinker", "talker")
    assert "GPUARModelRunner" in engines[0].call("runs")[0]
    for engine in engines:
        engine.begin("serve", REQUESTS, TOKENS)
    for engine in engines:
        assert [tokens for tokens, _, _ in engine.result()] == expected[engine.label]
    status = daemon.status()
    assert status.evictions > 0
    assert status.bytes_out == 0


def test_the_runner_alone_says_the_same(scene: Scene, expected: Expected) -> None:
    engine = process(scene, "talker")
    options = {"worker_cls": "tests.vllm.omni_ar.PlainARWorker", **OMNI}
    engine.start(**plain(scene.models / "talker", **options))
    assert engine.generate(REQUESTS[0], TOKENS) == expected["talker"][0]


@pytest.mark.parametrize("careless", ["NoLeaseWhileSampling", "NoLeaseWhileExecuting"])
def test_a_lease_that_ends_too_early_is_a_fault(scene: Scene, careless: str) -> None:
    """So the tests above would see it."""
    (engine,) = on_omni(scene, scene.daemon().folder, "talker", worker=careless)
    with pytest.raises(EngineDied):
        engine.generate(REQUESTS[0], TOKENS)
