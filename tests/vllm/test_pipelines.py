"""vllm-omni's own pipelines of Wan2.2 and Qwen-Image, tiny: strict, so that nothing is read unseen.

Their encoders, VAEs and DiTs are those of the real models; so are loader and attention.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import engines
from tests.vllm.engine import DRIVES
from tests.vllm.engines import Engine, Nursery, Scene

DRIVEN: Any = {DRIVES: "tests.vllm.diffusion:Diffusion"}
STEPS = 4
WAN, QWEN = "WanPipeline", "QwenImagePipeline"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Path:
    """A folder of each: DiTs of 5 and 7 MiB, VAEs of 10, small encoders."""
    folder = tmp_path_factory.mktemp("pipelines")
    nursery.call("tests.vllm.pipelines:write_all", str(folder))
    return folder


@pytest.fixture
def stages(checkpoints: Path, nursery: Nursery) -> Iterator[Scene]:
    with engines.scene(checkpoints, nursery) as made:
        yield made


def begin(stages: Scene, label: str, model: Path, **given: Any) -> Engine:
    stage = stages.process(label, multiprocessing=False, **DRIVEN)
    stage.begin("start", model=str(model), known=model.name, **given)
    return stage


@pytest.fixture(scope="module")
def expected(checkpoints: Path, nursery: Nursery) -> Mapping[str, list[str]]:
    """Two films, or pictures, as they are without swapd."""
    with engines.scene(checkpoints, nursery) as scene:
        plain = {name: begin(scene, name, checkpoints / name) for name in (WAN, QWEN)}
        for stage in plain.values():
            stage.result()
        return {n: [stage.film(seed, STEPS) for seed in (1, 2)] for n, stage in plain.items()}


IN_TURN = {"enable_cpu_offload": True}
SEQUENTIAL = {"cpu_offload_enabled": True, "cpu_offload_strategy": "sequential"}
BY_BLOCK = {"enable_layerwise_offload": True}
WHOLE = {"cpu_offload_enabled": True, "cpu_offload_components": ["."]}


@pytest.mark.parametrize(
    ("name", "budget", "settings"),
    [
        pytest.param(WAN, "12MiB", {}, id="Wan: nothing said"),
        pytest.param(WAN, "12MiB", SEQUENTIAL, id="Wan: sequential"),
        pytest.param(WAN, "18MiB", IN_TURN, id="Wan: in turn"),
        pytest.param(WAN, "16MiB", BY_BLOCK, id="Wan: block by block"),
        pytest.param(WAN, "24MiB", WHOLE, id="Wan: whole"),
        pytest.param(QWEN, "12MiB", {}, id="Qwen-Image: nothing said"),
        pytest.param(QWEN, "16MiB", BY_BLOCK, id="Qwen-Image: block by block"),
    ],
)
def test_what_is_drawn_is_the_same_whatever_goes_in_and_out(
    stages: Scene,
    checkpoints: Path,
    expected: Mapping[str, list[str]],
    name: str,
    budget: str,
    settings: dict[str, object],
) -> None:
    daemon = stages.daemon(budget=budget)
    swapd = {"endpoint": str(daemon.folder), "component": "dit", **settings}
    stage = begin(
        stages,
        "dit",
        checkpoints / name,
        worker_extension_cls="swapd_client.vllm.diffusion.DiffusionExtension",
        additional_config={"swapd": swapd},
    )
    stage.result()
    assert [stage.film(seed, STEPS) for seed in (1, 2)] == expected[name]
    assert expected[name][0] != expected[name][1]
    status = daemon.status()
    assert sum(c.nbytes for c in status.components) > 17 << 20, "all of it is swapd's"
    assert status.bytes_out == 0
    assert not any(c.leases for c in status.components)
    if settings is not WHOLE:
        assert status.evictions > 0
