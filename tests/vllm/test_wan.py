"""vllm-omni's own pipeline of Wan2.2, tiny, on swapd: strict, so that nothing of it is read unseen.

Its encoder, its VAE, its DiTs are those of the real model; so are its loader and its attention.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import engines
from tests.vllm.engine import DRIVES
from tests.vllm.engines import Engine, Nursery, Scene
from tests.vllm.environment import environment

DRIVEN: Any = {DRIVES: "tests.vllm.diffusion:Diffusion"}
STEPS = 4


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint: two DiTs of 5 MiB, a VAE of 10, an encoder."""
    folder = tmp_path_factory.mktemp("wan")
    command = [sys.executable, "-m", "tests.vllm.wan", str(folder)]
    subprocess.run(command, env=environment(), check=True)
    return folder


@pytest.fixture
def stages(wan: Path, nursery: Nursery) -> Iterator[Scene]:
    with engines.scene(wan, nursery) as made:
        yield made


def begin(stages: Scene, label: str, model: Path, **given: Any) -> Engine:
    stage = stages.process(label, multiprocessing=False, **DRIVEN)
    stage.begin("start", model=str(model), known="WanPipeline", **given)
    return stage


@pytest.fixture(scope="module")
def expected(wan: Path, nursery: Nursery) -> list[str]:
    """Two films, as they are without swapd."""
    with engines.scene(wan, nursery) as scene:
        plain = begin(scene, "plain", wan)
        plain.result()
        return [plain.film(seed, STEPS) for seed in (1, 2)]


@pytest.mark.parametrize(
    ("budget", "settings"),
    [
        ("12MiB", {}),
        ("12MiB", {"cpu_offload_enabled": True, "cpu_offload_strategy": "sequential"}),
        ("18MiB", {"enable_cpu_offload": True}),
        ("16MiB", {"enable_layerwise_offload": True}),
        ("24MiB", {"cpu_offload_enabled": True, "cpu_offload_components": ["."]}),
    ],
    ids=["nothing said", "sequential", "in turn", "block by block", "whole"],
)
def test_a_film_is_the_same_whatever_goes_in_and_out(
    stages: Scene, wan: Path, expected: list[str], budget: str, settings: dict[str, object]
) -> None:
    daemon = stages.daemon(budget=budget)
    swapd = {"endpoint": str(daemon.folder), "component": "wan", **settings}
    stage = begin(
        stages,
        "wan",
        wan,
        worker_extension_cls="swapd_client.vllm.diffusion.DiffusionExtension",
        additional_config={"swapd": swapd},
    )
    stage.result()
    assert [stage.film(seed, STEPS) for seed in (1, 2)] == expected
    assert expected[0] != expected[1]
    status = daemon.status()
    assert sum(c.nbytes for c in status.components) > 18 << 20, "all of it is swapd's"
    assert status.bytes_out == 0
    assert not any(c.leases for c in status.components)
    if settings.get("cpu_offload_components") != ["."]:
        assert status.evictions > 0
