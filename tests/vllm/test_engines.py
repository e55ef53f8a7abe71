"""The environment and the harness: engines of their own, and what is seen when they fail."""

import pytest

from swapd_client.vllm import versions
from tests.vllm.engines import EngineDied, EngineFailed, Scene, plain
from tests.vllm.models import MODELS


def test_the_environment_is_what_swapd_supports_and_finds_swapd(scene: Scene) -> None:
    engine = scene.process("none")
    for version, supported in zip(engine.versions(), versions.SUPPORTED.values(), strict=True):
        assert f"{version}.".startswith(supported)
    assert "swapd_client.vllm:register" in engine.plugins()


def test_each_model_says_something_else_and_the_same_again(scene: Scene) -> None:
    asked = [[5, 6, 7], [9, 10]]
    engines = scene.plain(*MODELS)
    said = [engine.generate(asked, 8) for engine in engines]
    assert all(len(tokens) == 8 for answer in said for tokens in answer)
    assert len({str(answer) for answer in said}) == len(MODELS)
    assert [engine.generate(asked, 8) for engine in engines] == said


def test_what_an_engine_raises_is_shown_with_its_log(scene: Scene) -> None:
    engine = scene.process("none")
    with pytest.raises(EngineFailed, match="no_such_folder"):
        engine.start(**plain(scene.folder / "no_such_folder"))
    engine.kill()
    with pytest.raises(EngineDied):
        engine.generate([[5]], 1)
