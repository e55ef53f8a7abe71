"""A real engine with a vision encoder as a component: it loads only for steps with pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import engines
from tests.vllm.engines import REQUESTS, TOKENS, Engine, Scene, on_swapd, plain

Expected = Mapping[str, list[list[list[int]]]]

#: As in `vision.py`: the tokens at the begin of a picture, in it, and at its end.
SEEN = [20, 3, 5, 4, 21, 22]
UNSEEN = [[30, 31, 32], [33, 34]]
RED, BLUE = (250, 20, 10), (10, 30, 240)

SEES: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 1, "video": 0},
    "mm_hasher_algorithm": "sha256",
}


@pytest.fixture(scope="session")
def seer(tmp_path_factory: pytest.TempPathFactory, nursery: engines.Nursery) -> Path:
    """The checkpoint."""
    folder = tmp_path_factory.mktemp("vision") / "seer"
    nursery.call("tests.vllm.vision:write", str(folder))
    return folder


def started(scene: Scene, arguments: Mapping[str, object]) -> Engine:
    engine = scene.process("seer")
    engine.imports("tests.vllm.vision")
    engine.start(**{**arguments, **SEES})
    return engine


def said(engine: Engine) -> list[Any]:
    """Its answers to pictures and to text; also to a picture that it has seen before."""
    return [
        engine.see(SEEN, RED, TOKENS),
        engine.generate(UNSEEN, TOKENS),
        engine.see(SEEN, BLUE, TOKENS),
        engine.generate(UNSEEN[:1], TOKENS),
    ]


@pytest.fixture(scope="module")
def without_swapd(seer: Path, models: Path, nursery: engines.Nursery) -> list[Any]:
    with engines.scene(models, nursery) as made:
        return said(started(made, plain(seer)))


def test_an_encoder_comes_for_the_steps_that_see_and_leaves(
    scene: Scene, seer: Path, without_swapd: list[Any]
) -> None:
    daemon = scene.daemon()
    settings = {
        "cpu_offload_enabled": True,
        "cpu_offload_components": ["visual"],
        "cpu_offload_strategy": "sequential",
    }
    engine = started(scene, on_swapd(seer, daemon.folder, settings))

    def loads() -> int:
        return daemon.component("seer.visual").loads

    at_first = loads()
    assert engine.generate(UNSEEN, TOKENS) == without_swapd[1]
    assert loads() == at_first, "nothing was seen"
    assert engine.see(SEEN, RED, TOKENS) == without_swapd[0]
    assert loads() == at_first + 1, "one step saw"
    assert engine.generate(UNSEEN, TOKENS) == without_swapd[1]
    assert engine.see(SEEN, BLUE, TOKENS) == without_swapd[2]
    assert loads() == at_first + 2
    assert without_swapd[0] != without_swapd[2], "the model sees"
    assert daemon.component("seer").loads == 1, "what is not named stays"
    assert daemon.status().bytes_out == 0


@pytest.mark.parametrize("components", [None, ["visual"]])
def test_it_takes_turns_with_another_stage(
    scene: Scene,
    seer: Path,
    without_swapd: list[Any],
    expected: Expected,
    components: list[str] | None,
) -> None:
    """With room for the other and the language model, but not for the encoder as well."""
    daemon = scene.daemon(budget="60MiB")
    settings = {"cpu_offload_enabled": True, "cpu_offload_components": components}
    engine = started(scene, on_swapd(seer, daemon.folder, settings))
    (talker,) = scene.on_swapd(daemon, "talker")
    talker.begin("serve", REQUESTS, TOKENS)
    assert said(engine) == without_swapd
    assert [tokens for tokens, _, _ in talker.result()] == expected["talker"]
    assert talker.generate(REQUESTS[0], TOKENS) == expected["talker"][0]
    assert said(engine) == without_swapd
    status = daemon.status()
    assert status.evictions > 0
    assert status.bytes_out == 0
