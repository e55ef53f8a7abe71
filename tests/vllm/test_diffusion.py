"""vllm-omni's diffusion worker, executor and runner, with their pipeline's weights in swapd."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.guarantees.harness import Daemon
from tests.vllm import engines
from tests.vllm.engine import DRIVES
from tests.vllm.engines import Engine, Nursery, Scene

EXTENSION = "swapd_client.vllm.diffusion.DiffusionExtension"
DRIVEN: Any = {DRIVES: "tests.vllm.diffusion:Diffusion"}
SEEDS = [1, 2, 3]

#: Of the toy pipeline: its DiT has 8 MiB and a norm, its encoder 4, its VAE 1, in chunks of 2.
ROOM_FOR_THE_LARGEST = "10MiB"


@pytest.fixture
def stages(tmp_path: Path, nursery: Nursery) -> Iterator[Scene]:
    """Daemons and diffusion stages of one test."""
    (tmp_path / "config.json").write_text("{}")
    with engines.scene(tmp_path, nursery) as made:
        yield made


def begin(stages: Scene, label: str, model: Path, **given: Any) -> Engine:
    stage = stages.process(label, multiprocessing=False, **DRIVEN)
    stage.begin("start", model=str(model), **given)
    return stage


def on_swapd(daemon: Daemon, label: str, **settings: object) -> dict[str, Any]:
    swapd = {"endpoint": str(daemon.folder), "component": label, **settings}
    return {"worker_extension_cls": EXTENSION, "additional_config": {"swapd": swapd}}


@pytest.fixture(scope="module")
def expected(nursery: Nursery) -> Mapping[int, list[str]]:
    """By the seed of the weights, what a stage without swapd draws."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text("{}")
        with engines.scene(Path(folder), nursery) as scene:
            plain = {
                seed: begin(scene, f"plain{seed}", Path(folder), pipeline={"seed": seed})
                for seed in (1, 2)
            }
            drawn = {}
            for seed, stage in plain.items():
                stage.result()
                drawn[seed] = stage.draw_many(SEEDS)
            return drawn


Expected = Mapping[int, list[str]]


@pytest.fixture
def toy(stages: Scene, tmp_path: Path) -> Callable[..., Engine]:
    """Starts a stage on a daemon, with the settings given."""

    def start(daemon: Daemon, label: str = "toy", seed: int = 1, **settings: object) -> Engine:
        on = on_swapd(daemon, label, **settings)
        stage = begin(stages, label, tmp_path, pipeline={"seed": seed}, **on)
        stage.result()
        return stage

    return start


Toy = Callable[..., Engine]


def policies(daemon: Daemon) -> dict[str, str]:
    return {c.name: c.policy for c in daemon.status().components}


def all_of(policy: str) -> dict[str, str]:
    return {f"toy.{name}": policy for name in ("text_encoder", "core", "vae")}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, all_of("lru")),
        ({"cpu_offload_enabled": True}, all_of("alternating")),
        (
            {"cpu_offload_enabled": True, "cpu_offload_strategy": "sequential"},
            all_of("sequential"),
        ),
    ],
    ids=["nothing said", "alternating", "sequential"],
)
def test_what_is_drawn_is_the_same_whatever_goes_in_and_out(
    stages: Scene,
    toy: Toy,
    expected: Expected,
    settings: dict[str, object],
    wanted: dict[str, str],
) -> None:
    daemon = stages.daemon(budget=ROOM_FOR_THE_LARGEST)
    stage = toy(daemon, **settings)
    assert stage.draw_many(SEEDS) == expected[1]
    assert policies(daemon) == wanted
    status = daemon.status()
    assert status.evictions > 0
    assert status.bytes_out == 0
    assert not any(c.leases for c in status.components)
    assert status.loads <= 3 * len(SEEDS), "none comes in more than once for a request"


def test_encoders_and_dits_take_turns_and_the_vae_stays(
    stages: Scene, toy: Toy, expected: Expected
) -> None:
    daemon = stages.daemon(budget="12MiB")  # the DiT and the VAE
    stage = toy(daemon, enable_cpu_offload=True)
    assert stage.draw_many(SEEDS) == expected[1]
    assert policies(daemon) == {**all_of("alternating"), "toy.vae": "resident"}
    assert daemon.component("toy.vae").loads == 1
    assert "DiTs and encoders take turns" in stage.log


@pytest.mark.parametrize(
    "settings", [{"enable_layerwise_offload": True}, {"cpu_offload_gb": 7 / 1024}]
)
def test_a_dit_larger_than_the_room_there_is_comes_in_block_by_block(
    stages: Scene, toy: Toy, expected: Expected, settings: dict[str, object]
) -> None:
    daemon = stages.daemon(budget="8MiB")
    stage = toy(daemon, **settings)
    assert stage.draw_many(SEEDS) == expected[1]
    assert "core (8.02 MiB, streamed in " in stage.log
    assert daemon.status().bytes_out == 0


def test_what_nobody_names_stays(stages: Scene, toy: Toy, expected: Expected) -> None:
    daemon = stages.daemon(budget="18MiB")
    settings = {"cpu_offload_enabled": True, "cpu_offload_components": ["text_*"]}
    stage = toy(daemon, cpu_offload_strategy="sequential", **settings)
    assert stage.draw_many(SEEDS) == expected[1]
    assert policies(daemon) == {**all_of("resident"), "toy.text_encoder": "sequential"}
    assert {c.name: c.loads for c in daemon.status().components} == {
        "toy.text_encoder": len(SEEDS),
        "toy.core": 1,
        "toy.vae": 1,
    }
    assert "on the GPU for good, once in: core, vae" in stage.log


def test_false_said_in_words_is_to_stay(stages: Scene, toy: Toy, expected: Expected) -> None:
    daemon = stages.daemon(budget="18MiB")
    stage = toy(daemon, cpu_offload_enabled=False)
    assert stage.draw_many(SEEDS) == expected[1]
    assert policies(daemon) == all_of("resident")


def test_all_of_it_can_be_one_component(stages: Scene, toy: Toy, expected: Expected) -> None:
    daemon = stages.daemon(budget="16MiB")
    whole = {"cpu_offload_enabled": True, "cpu_offload_components": ["."]}
    stage = toy(daemon, **whole)
    other = toy(daemon, "other", seed=2, **whole)
    assert stage.draw_many(SEEDS) == expected[1]
    assert other.draw_many(SEEDS) == expected[2]
    assert policies(daemon) == {"toy": "lru", "other": "lru"}
    assert not any(c.leases for c in daemon.status().components)
    assert daemon.status().loads == 2


def test_two_stages_take_turns_on_room_for_one(stages: Scene, toy: Toy, expected: Expected) -> None:
    daemon = stages.daemon(budget=ROOM_FOR_THE_LARGEST)
    one, two = toy(daemon, "one"), toy(daemon, "two", seed=2)
    one.begin("draw_many", SEEDS)
    two.begin("draw_many", SEEDS)
    assert one.result() == expected[1]
    assert two.result() == expected[2]
    status = daemon.status()
    assert status.evictions > 0
    assert status.bytes_out == 0
    loads = {c.name: c.loads for c in status.components}
    assert loads["one.core"] <= len(SEEDS), "a DiT does not go in the middle of a request"
    assert loads["two.core"] <= len(SEEDS)


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A fifo in which a request says that it has got to the middle."""
    path = tmp_path / "told"
    os.mkfifo(path)
    return path


def stopped(
    stages: Scene, tmp_path: Path, told: Path, daemon: Daemon, **settings: object
) -> Engine:
    """A stage in the middle of a request, holding its DiT."""
    pipeline = {"seed": 2, "told": str(told)}
    stage = begin(stages, "two", tmp_path, pipeline=pipeline, **on_swapd(daemon, "two", **settings))
    stage.result()
    stage.begin("draw", 1, "stop")
    assert told.read_text() == "stopped"
    return stage


def test_one_killed_in_a_request_costs_the_other_only_its_wait(
    stages: Scene, tmp_path: Path, told: Path, toy: Toy, expected: Expected
) -> None:
    daemon = stages.daemon(budget=ROOM_FOR_THE_LARGEST)
    one = toy(daemon, "one")
    two = stopped(stages, tmp_path, told, daemon)
    assert daemon.component("two.core").leases == 1
    one.begin("draw_many", SEEDS)
    daemon.await_record("Waiting", names=("one.text_encoder",))
    two.kill()
    assert one.result() == expected[1]
    assert {c.name for c in daemon.status().components} == {
        "one.text_encoder",
        "one.core",
        "one.vae",
    }
    assert daemon.status().bytes_out == 0
