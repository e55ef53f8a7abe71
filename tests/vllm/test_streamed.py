"""Real engines whose weights do not fit: layers come and go inside each step, to the same tokens."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from swapd.shared import vm
from tests.vllm.engines import (
    MIB,
    REQUESTS,
    TOKENS,
    Nursery,
    Scene,
    on_swapd,
    scene,
)

Expected = Mapping[str, list[list[list[int]]]]

#: Of the 147 MiB of `deep`, with 24 layers of 6 MiB.
BUDGET = 96 * MIB


@pytest.fixture
def place(deep: Path, nursery: Nursery) -> Iterator[Scene]:
    with scene(deep, nursery) as made:
        yield made


@pytest.mark.parametrize("isolation", ["relaxed", "strict"])
@pytest.mark.parametrize(
    ("options", "passing"),
    [
        pytest.param({"resident": "auto"}, 13, id="as many as do not fit"),
        pytest.param({"resident": "80MiB"}, 13, id="resident"),
        pytest.param({"cpu_offload_gb": 0.1}, 18, id="cpu_offload_gb"),
        pytest.param({"enable_layerwise_offload": True}, 24, id="all"),
    ],
)
def test_a_stage_larger_than_the_arena_computes_the_same(
    place: Scene, expected_deep: Expected, isolation: str, options: dict[str, Any], passing: int
) -> None:
    daemon = place.daemon(budget=BUDGET, isolation=isolation)
    (engine,) = place.start(on_swapd(place.models / "deep", daemon.folder, options))
    for number, prompts in enumerate(REQUESTS):
        assert engine.generate(prompts, TOKENS) == expected_deep["deep"][number]
    status = daemon.status()
    streamed = [one for one in status.components if one.name.startswith("deep.streamed/")]
    assert status.peak_bytes <= status.budget_bytes
    print(len(streamed), status.peak_bytes, engine.log[-3000:])
    assert len(streamed) == passing
