"""The environment and the harness: separate engines, and the report of their failures."""

from contextlib import closing
from pathlib import Path

import pytest

from swapd_client.vllm import versions
from tests.vllm import engines
from tests.vllm.engines import (
    REQUESTS,
    TOKENS,
    EngineDied,
    EngineFailed,
    Nursery,
    Scene,
    plain,
)
from tests.vllm.environment import ISA
from tests.vllm.models import MODELS


def test_the_environment_is_what_swapd_supports_and_finds_swapd(scene: Scene) -> None:
    engine = scene.process("none")
    for package, version in engine.versions().items():
        assert version.startswith(tuple(f"{minor}." for minor in versions.SUPPORTED[package]))
    assert "swapd_client.vllm:register" in engine.plugins()


def test_each_model_says_something_else_and_the_same_again(scene: Scene) -> None:
    asked = [[5, 6, 7], [9, 10]]
    engines = scene.plain(*MODELS)
    said = [engine.generate(asked, 8) for engine in engines]
    assert all(len(tokens) == 8 for answer in said for tokens in answer)
    assert len({str(answer) for answer in said}) == len(MODELS)
    assert [engine.generate(asked, 8) for engine in engines] == said


def test_engines_can_be_had_as_on_a_cpu_with_avx2_alone(models: Path) -> None:
    avx2 = {ISA: "avx2"}
    with closing(Nursery(**avx2)) as nursery, engines.scene(models, nursery) as made:
        both = [*made.plain("talker", **avx2), *made.on_swapd(made.daemon(), "talker", **avx2)]
        said = [engine.generate(REQUESTS[0], TOKENS) for engine in both]
        for engine in both:
            assert engine.run("tests.vllm.kernels:mapped") == ["_C_AVX2.abi3.so"]
            assert engine.run("torch.backends.cpu:get_cpu_capability") == "AVX2"
    assert said[0] == said[1]


def test_what_an_engine_raises_is_shown_with_its_log(scene: Scene) -> None:
    engine = scene.process("none")
    with pytest.raises(EngineFailed, match="no_such_folder"):
        engine.start(**plain(scene.folder / "no_such_folder"))
    engine.kill()
    with pytest.raises(EngineDied):
        engine.generate([[5]], 1)
