"""vllm-omni's diffusion worker, executor and runner, with their pipeline's weights in swapd."""

import json
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests.guarantees.harness import Daemon
from tests.vllm import engines
from tests.vllm.engine import DRIVES
from tests.vllm.engines import (
    Engine,
    EngineFailed,
    Nursery,
    Scene,
    await_components,
    await_leases_back,
    await_off,
)

EXTENSION = "swapd_client.vllm.diffusion.DiffusionExtension"
DRIVEN: Any = {DRIVES: "tests.vllm.diffusion:Diffusion"}
SEEDS = [1, 2, 3]

#: The toy pipeline: its DiT has 8 MiB and a norm, its encoder 4, its VAE 1, in chunks of 2.
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
    """The pictures of a stage without swapd, by the seed of the weights."""
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


IN_TURN = {**all_of("alternating"), "toy.vae": "permanent"}
SEQUENTIAL = {"cpu_offload_enabled": True, "cpu_offload_strategy": "sequential"}


@pytest.mark.parametrize(
    ("settings", "budget", "wanted", "said"),
    [
        ({}, ROOM_FOR_THE_LARGEST, all_of("lru"), ""),
        ({"cpu_offload_enabled": True}, ROOM_FOR_THE_LARGEST, all_of("alternating"), ""),
        (SEQUENTIAL, ROOM_FOR_THE_LARGEST, all_of("sequential"), ""),
        ({"enable_cpu_offload": True}, "12MiB", IN_TURN, "DiTs and encoders take turns"),
        ({"cpu_offload_enabled": False}, "18MiB", all_of("permanent"), ""),
    ],
    ids=["nothing said", "alternating", "sequential", "in turn", "false"],
)
def test_what_is_drawn_is_the_same_whatever_goes_in_and_out(
    stages: Scene,
    toy: Toy,
    expected: Expected,
    settings: dict[str, object],
    budget: str,
    wanted: dict[str, str],
    said: str,
) -> None:
    daemon = stages.daemon(budget=budget)
    stage = toy(daemon, **settings)
    at_start = daemon.status().loads
    assert stage.draw_many(SEEDS) == expected[1]
    assert policies(daemon) == wanted
    assert said in stage.log
    status = daemon.status()
    assert bool(status.evictions) == (wanted != all_of("permanent"))
    assert status.bytes_out == 0
    await_leases_back(daemon)
    asked = len(SEEDS) + 1  # the next request is foreseen
    assert status.loads - at_start <= 3 * asked, "none comes in more than once for a request"
    loads = {c.name: c.loads for c in status.components if c.policy == "permanent"}
    assert {*loads.values()} <= {1}


@pytest.mark.parametrize(
    "settings", [{}, {"enable_layerwise_offload": True}, {"cpu_offload_gb": 7 / 1024}]
)
def test_a_dit_larger_than_the_room_there_is_comes_in_block_by_block(
    stages: Scene, toy: Toy, expected: Expected, settings: dict[str, object]
) -> None:
    daemon = stages.daemon(budget="8MiB")
    stage = toy(daemon, **settings)
    assert stage.draw_many(SEEDS) == expected[1]
    assert "core (8.02 MiB, streamed in " in stage.log
    assert daemon.status().bytes_out == 0


FLAGS = ["enable_cpu_offload", "enable_layerwise_offload"]
MODULES = {"diffusion_offload_config": {"mode": "module", "components": ["dit", "text_encoder"]}}


def components(daemon: Daemon) -> set[tuple[str, str, int]]:
    return {(c.name, c.policy, c.nbytes) for c in daemon.status().components}


@pytest.mark.parametrize(
    ("theirs", "option"),
    [*(({flag: True}, flag) for flag in FLAGS), (MODULES, FLAGS[0])],
    ids=[*FLAGS, "diffusion_offload_config"],
)
def test_a_flag_of_the_stage_itself_does_what_the_option_does(
    stages: Scene,
    tmp_path: Path,
    toy: Toy,
    expected: Expected,
    theirs: dict[str, Any],
    option: str,
) -> None:
    ours, daemon = stages.daemon(budget="12MiB"), stages.daemon(budget="12MiB")
    toy(ours, **{option: True})
    stage = begin(
        stages, "flag", tmp_path, pipeline={"seed": 1}, **on_swapd(daemon, "toy"), **theirs
    )
    stage.result()
    assert components(daemon) == components(ours)
    assert stage.draw_many(SEEDS) == expected[1]
    assert f"stage 0: swapd takes over {option} from vllm-omni" in stage.log
    assert "Enabling offloader backend" not in stage.log
    stage.build_again()
    assert components(daemon) == components(ours)


@pytest.mark.parametrize(
    ("pipeline", "flag", "of_the_dit", "said"),
    [
        (
            {"declares": {"_layerwise_offload_blocks_attrs": ["blocks.0"]}},
            FLAGS[1],
            {"toy.core/rest", "toy.core/blocks.0"},
            "",
        ),
        (
            {
                "declares": {
                    "_layerwise_offload_blocks_attrs": None,
                    "_layerwise_offload_blocks_attr": "blocks.0",
                }
            },
            FLAGS[1],
            {"toy.core/rest", "toy.core/blocks.0"},
            "",
        ),
        (
            {"declares": {"_layerwise_offload_blocks_attrs": []}},
            FLAGS[1],
            {"toy.core"},
            "'core' has no list of blocks that holds most of it",
        ),
        ({"absent": ["dit"]}, FLAGS[0], set(), "no DiT is found among its components"),
        ({"absent": ["encoder"]}, FLAGS[0], {"toy.core"}, "no encoder is found among its comp"),
    ],
    ids=["attrs", "attr", "no blocks", "no DiT", "no encoder"],
)
def test_what_takes_turns_or_streams_is_what_a_pipeline_declares_and_what_lacks_is_warned_of(
    stages: Scene,
    tmp_path: Path,
    expected: Expected,
    pipeline: dict[str, Any],
    flag: str,
    of_the_dit: set[str],
    said: str,
) -> None:
    daemon = stages.daemon()
    given: dict[str, Any] = {"pipeline": {"seed": 1, **pipeline}, flag: True}
    stage = begin(stages, "toy", tmp_path, **given, **on_swapd(daemon, "toy"))
    stage.result()
    assert stage.draw_many(SEEDS) == expected[1]
    assert {name for name in policies(daemon) if name.startswith("toy.core")} == of_the_dit
    assert said in stage.log


def test_what_nobody_names_stays(stages: Scene, toy: Toy, expected: Expected) -> None:
    daemon = stages.daemon(budget="18MiB")
    settings = {"cpu_offload_enabled": True, "cpu_offload_components": ["text_*"]}
    stage = toy(daemon, cpu_offload_strategy="sequential", **settings)
    assert stage.draw_many(SEEDS) == expected[1]
    assert policies(daemon) == {**all_of("permanent"), "toy.text_encoder": "sequential"}
    loads = {c.name: c.loads for c in daemon.status().components}
    # one checks the moved weights at the start, one may be for the next request
    assert loads.pop("toy.text_encoder") - len(SEEDS) in (1, 2)
    assert loads == {"toy.core": 1, "toy.vae": 1}
    assert "on the GPU for good, once loaded: core, vae" in stage.log


def test_all_of_it_can_be_one_component(stages: Scene, toy: Toy, expected: Expected) -> None:
    daemon = stages.daemon(budget="16MiB")
    whole = {"cpu_offload_enabled": True, "cpu_offload_components": ["."]}
    stage = toy(daemon, **whole)
    other = toy(daemon, "other", seed=2, **whole)
    at_start = daemon.status().loads
    assert stage.draw_many(SEEDS) == expected[1]
    assert other.draw_many(SEEDS) == expected[2]
    assert policies(daemon) == {"toy": "lru", "other": "lru"}
    await_leases_back(daemon)
    assert daemon.status().loads == at_start + 2


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("method", ["Hides", "Wraps"])
def test_a_stage_whose_kernels_keep_most_weights_to_themselves_warns(
    stages: Scene, tmp_path: Path, expected: Expected, method: str, whole: bool
) -> None:
    """If it is one component, weights that an object wraps take turns with it."""
    settings = {"cpu_offload_enabled": True, "cpu_offload_components": ["."]} if whole else {}
    on = on_swapd(stages.daemon(), "toy", **settings)
    stage = begin(stages, "toy", tmp_path, pipeline={"seed": 1, "method": method}, **on)
    stage.result()
    assert stage.draw_many(SEEDS) == expected[1]
    warned = [line for line in stage.log.splitlines() if "stays there when the stage" in line]
    if whole and method == "Wraps":
        assert not warned
        return
    moved, share = ("6.031 MiB", "42 %") if whole else ("5.029 MiB", "35 %")
    assert f"toy has 14.03 MiB of weights, and {moved} of them in swapd ({share})" in warned[0]
    assert ("core.blocks.0.linear.quant_method" in warned[0]) == (method == "Wraps")


def test_two_stages_take_turns_on_room_for_one(stages: Scene, toy: Toy, expected: Expected) -> None:
    daemon = stages.daemon(budget=ROOM_FOR_THE_LARGEST)
    one, two = toy(daemon, "one"), toy(daemon, "two", seed=2)
    at_start = {c.name: c.loads for c in daemon.status().components}
    one.begin("draw_many", SEEDS)
    two.begin("draw_many", SEEDS)
    assert one.result() == expected[1]
    assert two.result() == expected[2]
    status = daemon.status()
    assert status.evictions > 0
    assert status.bytes_out == 0
    loads = {c.name: c.loads - at_start[c.name] for c in status.components}
    assert loads["one.core"] <= len(SEEDS), "a DiT does not go in the middle of a request"
    assert loads["two.core"] <= len(SEEDS)


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """A fifo to which a request writes when it is half done."""
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
    await_components(daemon, "one.text_encoder", "one.core", "one.vae")
    assert daemon.status().bytes_out == 0


@pytest.mark.parametrize(
    ("budget", "settings"),
    [
        (ROOM_FOR_THE_LARGEST, {}),
        ("14MiB", {"enable_layerwise_offload": True}),
        ("16MiB", {"cpu_offload_enabled": True, "cpu_offload_components": ["."]}),
    ],
    ids=["components", "layer by layer", "whole"],
)
def test_after_a_restart_of_the_daemon_a_stage_comes_back(
    stages: Scene,
    toy: Toy,
    tmp_path: Path,
    told: Path,
    expected: Expected,
    budget: str,
    settings: dict[str, Any],
) -> None:
    """One daemon dies in a request, and one between two."""
    daemon = stages.daemon(budget=budget)
    stage = stopped(stages, tmp_path, told, daemon, **settings)
    for _ in range(2):
        before = policies(daemon)
        daemon.kill()
        if told.exists():
            told.write_text("go on")
            told.unlink()
            assert stage.result() == expected[2][0]
        assert stage.draw_many(SEEDS) == expected[2]
        daemon = stages.daemon_again(daemon, budget=budget)
        names = set(before)
        while names:
            names.discard(daemon.await_record("Commit").name)
        assert stage.draw_many(SEEDS) == expected[2]
        assert policies(daemon) == before
        assert "two is back in swapd" in stage.log
    other = toy(daemon, "other", seed=1, **settings)
    assert other.draw_many(SEEDS) == expected[1]
    assert stage.draw_many(SEEDS) == expected[2]
    assert daemon.status().evictions > 0
    assert daemon.status().bytes_out == 0


def refused(stage: Engine) -> str:
    """The reason why it did not start."""
    with pytest.raises(EngineFailed) as failed:
        stage.result()
    return f"{failed.value.kind}: {failed.value.message}"


def test_without_a_daemon_the_start_fails_with_the_command_to_run(
    stages: Scene, tmp_path: Path
) -> None:
    swapd = {"swapd": {"endpoint": str(tmp_path / "nothing")}}
    stage = begin(stages, "toy", tmp_path, worker_extension_cls=EXTENSION, additional_config=swapd)
    said = refused(stage)
    assert said.startswith("NotRunning: stage 'stage0' cannot start: no swapd at")
    assert "swapd serve" in said


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (
            {"cpu_offload_enabled": True, "cpu_offload_components": ["transformer"]},
            {},
            "names 'transformer'; this pipeline has text_encoder, core, vae, and '.' is the whole",
        ),
        (
            {},
            {"enable_distributed_layerwise_offload": True},
            "set enable_layerwise_offload instead of enable_distributed_layerwise_offload",
        ),
        (
            {},
            {"parallel_config": {"use_hsdp": True, "hsdp_shard_size": 1}},
            "set use_hsdp: false",
        ),
        ({}, {"enable_sleep_mode": True}, "sleep and wake_up work without it"),
    ],
)
def test_settings_that_make_no_sense_and_what_else_moves_weights_are_refused_at_start(
    stages: Scene, tmp_path: Path, ours: dict[str, object], theirs: dict[str, Any], said: str
) -> None:
    stage = begin(stages, "toy", tmp_path, **on_swapd(stages.daemon(), "toy", **ours), **theirs)
    assert said in refused(stage)


def test_what_the_deploy_file_says_arrives_at_the_worker(stages: Scene, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "transformer").mkdir(parents=True)
    (model / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    (model / "transformer" / "config.json").write_text("{}")
    lines = {
        "worker_extension_cls": EXTENSION,
        "additional_config": {"swapd": {"component": "wan"}},
        "enable_cpu_offload": True,
    }
    base = Path(sysconfig.get_path("purelib")) / "vllm_omni" / "deploy" / "wan2_2_ti2v.yaml"
    overlay = {"base_config": str(base), "stages": [{"stage_id": 0, **lines}]}
    path = tmp_path / "overlay.yaml"
    path.write_text(yaml.safe_dump(overlay))
    stage = stages.process("config", multiprocessing=False, **DRIVEN)
    said = stage.configured("wan2_2_ti2v", str(path), str(model))
    assert said == {**lines, "num_gpus": 1}


def test_requests_that_are_computed_a_step_at_a_time_are_the_same(
    stages: Scene, tmp_path: Path, expected: Expected
) -> None:
    daemon = stages.daemon(budget=ROOM_FOR_THE_LARGEST)
    given: dict[str, Any] = {"pipeline": {"seed": 1}, "step_execution": True}
    stage = begin(stages, "toy", tmp_path, **given, **on_swapd(daemon, "toy"))
    stage.result()
    assert stage.draw_by_steps(SEEDS) == expected[1]
    assert daemon.status().evictions > 0
    await_leases_back(daemon)


@pytest.mark.parametrize(
    "settings",
    [{}, {"cpu_offload_enabled": True, "cpu_offload_components": ["."]}],
    ids=["components", "whole"],
)
def test_a_stage_that_sleeps_leaves_the_device_and_draws_the_same_when_it_is_awake(
    stages: Scene, toy: Toy, expected: Expected, settings: dict[str, Any]
) -> None:
    """By vllm-omni's tasks, at both levels, and by tags."""
    daemon = stages.daemon()
    stage = toy(daemon, **settings)
    for level, tags in ((1, []), (2, ["weights", "kv_cache"])):
        assert stage.draw_many(SEEDS) == expected[1]
        status, free = stage.sleep(level)
        assert status == "SUCCESS"
        assert free >= sum(c.nbytes for c in daemon.status().components)
        await_off(daemon, "toy")
        for few in [[tag] for tag in tags] or [[]]:
            assert stage.wake_up(*few) == "SUCCESS"
    assert stage.draw_many(SEEDS) == expected[1]
    assert "toy sleeps: others may have its memory" in stage.log


def test_a_stage_that_ends_leaves_nothing(stages: Scene, toy: Toy) -> None:
    daemon = stages.daemon()
    stage = toy(daemon)
    stage.draw(1)
    stage.shut_down()
    await_components(daemon)


@pytest.mark.parametrize("more", [{"compile": "regional"}, {"compile": "full"}, {"cache": True}])
def test_compiled_or_cached_it_draws_what_it_does_without_swapd(
    stages: Scene, tmp_path: Path, expected: Expected, more: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"pipeline": {"seed": 1, **more}, "enforce_eager": "cache" in more}
    daemon = stages.daemon(budget=ROOM_FOR_THE_LARGEST)
    plain = begin(stages, "plain", tmp_path, **given)
    stage = begin(stages, "toy", tmp_path, **given, **on_swapd(daemon, "toy"))
    plain.result()
    stage.result()
    drawn = plain.draw_many(SEEDS)
    assert stage.draw_many(SEEDS) == drawn
    assert (drawn != expected[1]) == ("cache" in more), "the cache was used"
    assert daemon.status().evictions > 0
    if more.get("compile") == "regional":
        assert "Regional compilation applied to 8 module(s)" in stage.log


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of two of the DiT's layers, as PEFT saves it."""
    folder = tmp_path_factory.mktemp("lora")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["linear"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    numbers = torch.Generator().manual_seed(5)
    weights = {}
    for block in (2, 5):
        name = f"base_model.model.core.blocks.{block}.linear"
        weights[f"{name}.lora_A.weight"] = torch.randn(4, 512, generator=numbers)
        weights[f"{name}.lora_B.weight"] = torch.randn(512, 4, generator=numbers)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_comes_and_goes_while_the_weights_do(
    stages: Scene, tmp_path: Path, toy: Toy, expected: Expected, adapter: Path
) -> None:
    daemon = stages.daemon(budget=ROOM_FOR_THE_LARGEST)
    plain = begin(stages, "plain", tmp_path, pipeline={"seed": 1})
    stage = toy(daemon)
    plain.result()
    adapted = plain.draw(1, lora=str(adapter))
    assert adapted != expected[1][0]
    assert stage.draw(1) == expected[1][0]
    assert stage.draw(1, lora=str(adapter)) == adapted
    assert stage.draw_many(SEEDS) == expected[1]
    assert stage.draw(1, lora=str(adapter)) == adapted
    assert daemon.status().bytes_out == 0


def test_with_swapd_disabled_the_extension_leaves_the_worker_as_it_is(
    stages: Scene, tmp_path: Path, expected: Expected
) -> None:
    swapd = {"endpoint": "/no/daemon", "component": "toy"}
    given = {"worker_extension_cls": EXTENSION, "additional_config": {"swapd": swapd}}
    stage = stages.process("off", multiprocessing=False, **DRIVEN, SWAPD_DISABLE="1")
    stage.begin("start", model=str(tmp_path), pipeline={"seed": 1}, **given)
    stage.result()
    assert stage.draw_many(SEEDS) == expected[1]
