"""vllm-omni's own pipelines, tiny: strict, so that nothing is read unseen.

vllm-omni's caches between steps are compared with the same cache without swapd. Encoders, VAEs and
DiTs are those of the real models; so are loader and attention.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import engines
from tests.vllm.engine import DRIVES
from tests.vllm.engines import Engine, Nursery, Scene, await_leases_back

DRIVEN: Any = {DRIVES: "tests.vllm.diffusion:Diffusion"}
STEPS = 4
WAN, QWEN = "WanPipeline", "QwenImagePipeline"
FLUX, SD3 = "FluxPipeline", "StableDiffusion3Pipeline"

#: vllm-omni's caches between steps, set so that they leave out blocks in these few steps.
TEA = {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 100.0}}
DIT = {
    "cache_backend": "cache_dit",
    "cache_config": {"max_warmup_steps": 1, "residual_diff_threshold": 10.0},
}
CACHES: Mapping[str, Mapping[str, Any]] = {"": {}, "TeaCache": TEA, "Cache-DiT": DIT}

#: Pipelines, with the caches that they are run with.
RUN = [(name, "") for name in (WAN, QWEN, FLUX, SD3)]
RUN += [(name, cache) for name in (QWEN, FLUX) for cache in ("TeaCache", "Cache-DiT")]


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


Expected = Mapping[tuple[str, str], list[str]]


@pytest.fixture(scope="module")
def expected(checkpoints: Path, nursery: Nursery) -> Expected:
    """Two films, or pictures, as they are without swapd, by pipeline and cache."""
    drawn = {}
    with engines.scene(checkpoints, nursery) as scene:
        for name, cache in RUN:
            stage = begin(scene, name, checkpoints / name, **CACHES[cache])
            stage.result()
            drawn[name, cache] = [stage.film(seed, STEPS) for seed in (1, 2)]
            stage.close()
    return drawn


IN_TURN = {"enable_cpu_offload": True}
SEQUENTIAL = {"cpu_offload_enabled": True, "cpu_offload_strategy": "sequential"}
BY_BLOCK = {"enable_layerwise_offload": True}
WHOLE = {"cpu_offload_enabled": True, "cpu_offload_components": ["."]}
#: As flags of the stage itself, not in swapd's options.
OWN_IN_TURN, OWN_BY_BLOCK = dict(IN_TURN), dict(BY_BLOCK)


@pytest.mark.parametrize(
    ("name", "cache", "budget", "settings"),
    [
        pytest.param(QWEN, "", "18MiB", OWN_IN_TURN, id="Qwen-Image: in turn, its own flag"),
        pytest.param(WAN, "", "16MiB", OWN_BY_BLOCK, id="Wan: block by block, its own flag"),
        pytest.param(WAN, "", "12MiB", {}, id="Wan: nothing said"),
        pytest.param(WAN, "", "12MiB", SEQUENTIAL, id="Wan: sequential"),
        pytest.param(WAN, "", "18MiB", IN_TURN, id="Wan: in turn"),
        pytest.param(WAN, "", "16MiB", BY_BLOCK, id="Wan: block by block"),
        pytest.param(WAN, "", "24MiB", WHOLE, id="Wan: whole"),
        pytest.param(QWEN, "", "12MiB", {}, id="Qwen-Image: nothing said"),
        pytest.param(QWEN, "", "16MiB", BY_BLOCK, id="Qwen-Image: block by block"),
        pytest.param(QWEN, "TeaCache", "12MiB", {}, id="Qwen-Image, TeaCache: nothing said"),
        pytest.param(QWEN, "TeaCache", "18MiB", IN_TURN, id="Qwen-Image, TeaCache: in turn"),
        pytest.param(
            QWEN, "TeaCache", "16MiB", BY_BLOCK, id="Qwen-Image, TeaCache: block by block"
        ),
        pytest.param(QWEN, "Cache-DiT", "12MiB", {}, id="Qwen-Image, Cache-DiT: nothing said"),
        pytest.param(QWEN, "Cache-DiT", "18MiB", IN_TURN, id="Qwen-Image, Cache-DiT: in turn"),
        pytest.param(
            QWEN, "Cache-DiT", "16MiB", BY_BLOCK, id="Qwen-Image, Cache-DiT: block by block"
        ),
        pytest.param(FLUX, "", "14MiB", {}, id="Flux: nothing said"),
        pytest.param(FLUX, "", "20MiB", BY_BLOCK, id="Flux: block by block"),
        pytest.param(FLUX, "TeaCache", "20MiB", BY_BLOCK, id="Flux, TeaCache: block by block"),
        pytest.param(FLUX, "Cache-DiT", "20MiB", BY_BLOCK, id="Flux, Cache-DiT: block by block"),
        pytest.param(SD3, "", "14MiB", {}, id="SD3: nothing said"),
        pytest.param(SD3, "", "20MiB", BY_BLOCK, id="SD3: block by block"),
    ],
)
def test_what_is_drawn_is_the_same_whatever_goes_in_and_out(
    stages: Scene,
    checkpoints: Path,
    expected: Expected,
    name: str,
    cache: str,
    budget: str,
    settings: dict[str, object],
) -> None:
    daemon = stages.daemon(budget=budget)
    own = settings if settings is OWN_IN_TURN or settings is OWN_BY_BLOCK else {}
    given = {} if own else settings
    swapd = {"endpoint": str(daemon.folder), "component": "dit", **given}
    stage = begin(
        stages,
        "dit",
        checkpoints / name,
        worker_extension_cls="swapd_client.vllm.diffusion.DiffusionExtension",
        additional_config={"swapd": swapd},
        **CACHES[cache],
        **own,
    )
    stage.result()
    drawn = expected[name, cache]
    assert [stage.film(seed, STEPS) for seed in (1, 2)] == drawn
    assert drawn[0] != drawn[1]
    if cache:
        assert drawn != expected[name, ""], "it leaves out blocks"
    await_leases_back(daemon)
    status = daemon.status()
    assert sum(c.nbytes for c in status.components) > 17 << 20, "all of it is swapd's"
    assert status.bytes_out == 0
    if settings is not WHOLE:
        assert status.evictions > 0
