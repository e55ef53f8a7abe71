"""A real engine with a vision encoder as a component: it loads only for steps with pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import engines
from tests.vllm.engines import REQUESTS, TOKENS, Engine, Nursery, Scene, on_swapd, plain
from tests.vllm.test_zoo import DRIVEN, PICTURES, TEXT, WITH_TOKENIZER, zoo

__all__ = ["zoo"]

Expected = Mapping[str, list[list[list[int]]]]

SEER = "qwen2-vl"
RED, BLUE = PICTURES
#: Also a picture that it has seen before.
ASKED = [RED, TEXT, BLUE, TEXT[:1], RED]


def started(scene: Scene, arguments: Mapping[str, object]) -> Engine:
    engine = scene.process(SEER, **DRIVEN)
    engine.start(**arguments)
    return engine


@pytest.fixture(scope="module")
def without_swapd(zoo: Path, models: Path, nursery: Nursery) -> list[Any]:
    with engines.scene(models, nursery) as made:
        said: list[Any] = started(made, plain(zoo / SEER, **WITH_TOKENIZER)).answer(ASKED)
    assert said[0] != said[2], "the model sees"
    return said


def test_an_encoder_comes_for_the_steps_that_see_and_leaves(
    scene: Scene, zoo: Path, without_swapd: list[Any]
) -> None:
    daemon = scene.daemon()
    settings = {
        "cpu_offload_enabled": True,
        "cpu_offload_components": ["visual"],
        "cpu_offload_strategy": "sequential",
    }
    engine = started(scene, on_swapd(zoo / SEER, daemon.folder, settings, **WITH_TOKENIZER))
    loads = [daemon.component(f"{SEER}.visual").loads]
    for asked, said in zip(ASKED[:4], without_swapd, strict=False):
        assert engine.answer([asked]) == [said]
        loads.append(daemon.component(f"{SEER}.visual").loads)
    assert [after - loads[0] for after in loads[1:]] == [1, 1, 2, 2], "for each step that saw"
    assert daemon.component(SEER).loads == 1, "what is not named stays"
    assert daemon.status().bytes_out == 0


@pytest.mark.parametrize("components", [None, ["visual"]])
def test_it_takes_turns_with_another_stage(
    scene: Scene,
    zoo: Path,
    without_swapd: list[Any],
    expected: Expected,
    components: list[str] | None,
) -> None:
    """With room for the other and the language model, but not for the encoder as well."""
    daemon = scene.daemon(budget="54MiB")
    settings = {"cpu_offload_enabled": True, "cpu_offload_components": components}
    engine = started(scene, on_swapd(zoo / SEER, daemon.folder, settings, **WITH_TOKENIZER))
    (talker,) = scene.on_swapd(daemon, "talker")
    talker.begin("serve", REQUESTS, TOKENS)
    assert engine.answer(ASKED) == without_swapd
    assert [tokens for tokens, _, _ in talker.result()] == expected["talker"]
    assert talker.generate(REQUESTS[0], TOKENS) == expected["talker"][0]
    assert engine.answer(ASKED) == without_swapd
    status = daemon.status()
    assert status.evictions > 0
    assert status.bytes_out == 0
