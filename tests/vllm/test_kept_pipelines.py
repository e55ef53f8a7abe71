"""A diffusion stage that starts again reads no DiT, where the daemon has kept it."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.guarantees.harness import Daemon
from tests.vllm import engines
from tests.vllm.engines import Engine, Nursery, Scene
from tests.vllm.test_kept import await_settled
from tests.vllm.test_pipelines import DRIVEN, FLUX, QWEN, SD3, STEPS, WAN

SEEDS = (1, 2)
SETTINGS: Mapping[str, dict[str, Any]] = {
    WAN: {},
    QWEN: {"enable_layerwise_offload": True},
    FLUX: {"enable_cpu_offload": True},
    SD3: {},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    nursery.call("tests.vllm.pipelines:write_all", str(folder))
    for model in folder.iterdir():
        await_settled_all(model)
    return folder


def await_settled_all(model: Path) -> None:
    for part in filter(Path.is_dir, model.iterdir()):
        await_settled(part)


@pytest.fixture
def stages(checkpoints: Path, nursery: Nursery) -> Iterator[Scene]:
    with engines.scene(checkpoints, nursery) as made:
        yield made


def started(
    stages: Scene, model: Path, daemon: Daemon | None = None, imports: str = "", **settings: Any
) -> Engine:
    how: dict[str, Any] = {}
    if daemon is not None:
        swapd = {"endpoint": str(daemon.folder), "component": "dit", **settings}
        how["worker_extension_cls"] = "swapd_client.vllm.diffusion.DiffusionExtension"
        how["additional_config"] = {"swapd": swapd}
    stage = stages.process("dit", multiprocessing=False, **DRIVEN)
    if imports:
        stage.imports(imports)
    stage.start(model=str(model), known=model.name, **how)
    return stage


def drawn(stage: Engine) -> tuple[list[str], int]:
    """Ends the stage. Returns what it draws, and how many tensors it has read."""
    said = [stage.film(seed, STEPS) for seed in SEEDS], stage.tensors_read()
    stage.close()
    return said


def served(
    stages: Scene, model: Path, daemon: Daemon, imports: str = "", **settings: Any
) -> tuple[list[str], int]:
    said = drawn(started(stages, model, daemon, imports, **settings))
    while daemon.status().components:
        daemon.await_record("SessionGone")
    return said


Expected = Mapping[str, tuple[list[str], int]]


@pytest.fixture(scope="module")
def expected(checkpoints: Path, nursery: Nursery) -> Expected:
    """What is drawn without swapd, and how many tensors are read for that."""
    with engines.scene(checkpoints, nursery) as made:
        return {name: drawn(started(made, checkpoints / name)) for name in SETTINGS}


@pytest.fixture
def daemon(stages: Scene) -> Daemon:
    return stages.daemon(budget="24MiB", keep_host="64MiB")


@pytest.fixture
def wan(checkpoints: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    folder = shutil.copytree(checkpoints / WAN, tmp_path / WAN)
    await_settled_all(folder)
    return folder


@pytest.mark.parametrize("name", SETTINGS)
def test_a_pipeline_that_starts_again_reads_no_dit_and_draws_as_plain_vllm_omni(
    daemon: Daemon, stages: Scene, checkpoints: Path, expected: Expected, name: str
) -> None:
    pictures, of_files = expected[name]
    for read in (of_files, 0, 0) if name == WAN else (of_files, 0):
        said = served(stages, checkpoints / name, daemon, **SETTINGS[name])
        assert said == (pictures, read)


def test_changed_files_are_read(
    daemon: Daemon, stages: Scene, wan: Path, expected: Expected
) -> None:
    assert served(stages, wan, daemon) == expected[WAN]
    (file,) = (wan / "transformer_2").glob("*.safetensors")
    halved = {name: one * 0.5 for name, one in load_file(file).items()}
    save_file(halved, file, {"format": "pt"})
    await_settled_all(wan)
    others, of_files = drawn(started(stages, wan))
    assert others != expected[WAN][0]
    for read in (of_files, 0):
        assert served(stages, wan, daemon) == (others, read)


def test_what_the_daemon_has_kept_in_part_is_read_after_all(
    daemon: Daemon, stages: Scene, checkpoints: Path, expected: Expected
) -> None:
    assert served(stages, checkpoints / WAN, daemon) == expected[WAN]
    daemon.observer.forget(daemon.status().kept[0].name)
    assert served(stages, checkpoints / WAN, daemon) == expected[WAN]


@pytest.mark.parametrize("imports", ["tests.vllm.checking", "tests.vllm.summing"])
def test_so_is_what_cannot_be_processed_unread_or_what_loading_computes_numbers_from(
    daemon: Daemon, stages: Scene, checkpoints: Path, expected: Expected, imports: str
) -> None:
    for _ in range(2):
        assert served(stages, checkpoints / WAN, daemon, imports) == expected[WAN]
