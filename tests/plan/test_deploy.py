"""A plan reads a deploy file as vLLM-Omni does, and names every setting that makes no sense."""

import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from swapd.plan import deploy, snippets
from swapd.plan.deploy import BadDeploy, DeployStage
from tests.files import file_with
from tests.plan import omni

AR = "swapd_client.vllm.omni.ARWorker"
DIFFUSION = "swapd_client.vllm.diffusion.DiffusionExtension"
BASE = """
async_chunk: true
stages:
  - {stage_id: 0, gpu_memory_utilization: 0.9, devices: "0", engine_extras: {a: 1}}
  - {stage_id: 1, gpu_memory_utilization: 0.6, devices: "1", enforce_eager: true}
platforms:
  npu: {stages: [{stage_id: 0, devices: "2,3"}]}
  cuda: {stages: [{stage_id: 1, gpu_memory_utilization: 0.5}]}
"""


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    return file_with(folder / name, text)


def stages(folder: Path, text: str) -> tuple[DeployStage, ...]:
    return deploy.read(write(folder, text)).stages


def one(folder: Path, **keys: object) -> DeployStage:
    text = yaml.safe_dump({"stages": [{"stage_id": 0, "worker_cls": AR, **keys}]})
    (stage,) = stages(folder, text)
    return stage


def refused(folder: Path, text: str) -> str:
    with pytest.raises(BadDeploy) as caught:
        deploy.read(write(folder, text))
    assert str(folder) in str(caught.value)
    return str(caught.value)


# --- bases -----------------------------------------------------------------------------------


def test_an_overlay_wins_over_its_base_and_cuda_over_both(tmp_path: Path) -> None:
    write(tmp_path, BASE, "base.yaml")
    thinker, talker = stages(
        tmp_path,
        f"""
base_config: base.yaml
stages:
  - stage_id: 0
    worker_cls: {AR}
    gpu_memory_utilization: 0.1
    engine_extras: {{b: 2}}
    additional_config: {{swapd: {{component: thinker}}}}
""",
    )
    assert (thinker.name, thinker.ours, thinker.utilization) == ("thinker", True, 0.1)
    assert (talker.name, talker.ours, talker.utilization) == ("stage1", False, 0.5)
    assert (thinker.gpus, talker.gpus) == ((0,), (1,))
    assert (thinker.graphs, talker.graphs) == (True, False)


def test_a_base_is_found_in_an_installed_vllm_omni(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    omni.installed(tmp_path / "site", write(tmp_path, BASE, "base.yaml"))
    base = tmp_path / "site" / "vllm_omni" / "deploy" / "qwen3.yaml"
    for change in (monkeypatch.syspath_prepend, partial(monkeypatch.setenv, "PYTHONPATH")):
        change(str(tmp_path / "site"))
    found = deploy.read(write(tmp_path, "base_config: qwen3.yaml\nasync_chunk: false\n"))
    assert "vllm_omni" not in sys.modules
    assert [s.name for s in found.stages] == ["thinker", "talker"]
    assert found.own["base_config"] == str(base)
    assert [s.id for s in found.stages] == [0, 1]
    assert not found.async_chunk


def test_the_overlay_that_is_printed_stands_by_itself(tmp_path: Path) -> None:
    write(tmp_path, BASE, "base.yaml")
    own = f"base_config: base.yaml\nasync_chunk: false\nstages: [{{stage_id: 1, worker_cls: {AR}}}]"
    found = deploy.read(write(tmp_path, own))
    printed = snippets.overlay(found, {0: {"kv": 1}, 1: {"gpu_memory_utilization": 0.2}})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    again = deploy.read(write(elsewhere, printed))
    assert [s.utilization for s in again.stages] == [0.9, 0.2]
    assert again.stages[1].ours
    assert not again.async_chunk
    assert again.own["stages"][0] == {"stage_id": 0, "kv": 1}


def test_what_is_printed_holds_wherever_it_was_said_before(tmp_path: Path) -> None:
    """The base file may set it in a stage's own dictionaries, or for CUDA."""
    base = """
    stages:
      - {stage_id: 0, engine_args: {gpu_memory_utilization: 0.8, seed: 1}}
      - {stage_id: 1, gpu_memory_utilization: 0.3}
    platforms:
      cuda:
        stages:
          - {stage_id: 1, gpu_memory_utilization: 0.4}
    """
    write(tmp_path, base, "base.yaml")
    above = write(tmp_path, "base_config: base.yaml")
    changes = {n: {"gpu_memory_utilization": 0.2} for n in (0, 1)}
    for path in (tmp_path / "base.yaml", above):
        printed = snippets.overlay(deploy.read(path), changes)
        again = deploy.read(write(tmp_path, printed, "again.yaml"))
        assert [s.utilization for s in again.stages] == [0.2, 0.2]
        assert again.whole["stages"][0]["engine_args"]["seed"] == 1
    only = snippets.overlay(deploy.read(above), {0: {"max_model_len": 8}})
    assert "platforms" not in yaml.safe_load(only)


def test_stages_of_which_all_but_one_stand_alone_are_at_work_at_once(tmp_path: Path) -> None:
    two = "stages: [{stage_id: 0, async_chunk: false}, {stage_id: 1%s}]"
    assert deploy.read(write(tmp_path, two % "")).async_chunk
    assert not deploy.read(write(tmp_path, two % ", async_chunk: false")).async_chunk


# --- one stage -------------------------------------------------------------------------------


def test_what_a_stage_says_of_offloading_is_read_by_its_names(tmp_path: Path) -> None:
    said = {"cpu_offload_enabled": True, "cpu_offload_components": ["visual"]}
    stage = one(tmp_path, additional_config={"swapd": said})
    assert stage.offload.cpu_offload_components == ("visual",)
    assert not stage.stays
    assert one(tmp_path, additional_config={"swapd": {"cpu_offload_enabled": False}}).stays


def test_a_flag_of_a_stage_itself_counts_where_swapd_takes_it_over(tmp_path: Path) -> None:
    flag = {"enable_layerwise_offload": True}
    assert one(tmp_path, worker_extension_cls=DIFFUSION, **flag).offload.mode == "layerwise"
    assert one(tmp_path, **flag).offload.mode == "off"


@pytest.mark.parametrize(
    ("keys", "gpus", "shards"),
    [
        ({}, (0,), 1),
        ({"devices": "1"}, (1,), 1),
        ({"devices": 2}, (2,), 1),
        ({"tensor_parallel_size": 2}, (0, 1), 2),
        ({"tensor_parallel_size": 2, "devices": "2,3"}, (2, 3), 2),
        ({"pipeline_parallel_size": 2}, (0, 1), 1),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, (0, 1, 2, 3), 2),
        ({"num_replicas": 2, "devices": "0,3"}, (0, 3), 1),
        ({"num_replicas": 2, "tensor_parallel_size": 2, "devices": "0,1"}, (0, 1, 2, 3), 2),
        ({"engine_args": {"tensor_parallel_size": 2}, "runtime": {"devices": "0,1"}}, (0, 1), 2),
    ],
)
def test_processes_are_where_the_devices_say(
    tmp_path: Path, keys: dict[str, object], gpus: tuple[int, ...], shards: int
) -> None:
    stage = one(tmp_path, **keys)
    assert (stage.gpus, stage.shards) == (gpus, shards)


def test_a_compilation_without_graphs_captures_none(tmp_path: Path) -> None:
    assert one(tmp_path).graphs
    assert not one(tmp_path, compilation_config={"cudagraph_mode": "NONE"}).graphs
    assert one(tmp_path, compilation_config={"cudagraph_mode": "PIECEWISE"}).graphs


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stages: [", "mine.yaml"),
        ("[]", "is no deploy file"),
        ("async_chunk: false", "lists no stages"),
        ("stages: [{devices: 0}]", "needs a stage_id"),
        ("stages: [{stage_id: 0}, {stage_id: 0}]", "several stages have one stage_id"),
        ("base_config: nowhere.yaml", "its base_config nowhere.yaml is not beside it"),
        ("base_config: mine.yaml", "is based on it in turn"),
        ("stages: [{stage_id: 0, devices: gpu}]", "names no GPUs"),
        ("stages: [{stage_id: 0, gpu_memory_utilization: 1.5}]", "at most 1"),
        ("stages: [{stage_id: 0, gpu_memory_utilization: much}]", "must be a number above 0"),
        ("stages: [{stage_id: 0, additional_config: 3}]", "additional_config has no keys"),
        (
            "stages: [{stage_id: 0, additional_config: {swapd: {cpu_offload_strategy: none}}}]",
            "alternating, sequential",
        ),
        (
            f"stages: [{{stage_id: 0, worker_extension_cls: {DIFFUSION}, "
            "diffusion_offload_config: {mode: layer, components: [text_encoder]}}]",
            "enable_layerwise_offload or enable_cpu_offload instead",
        ),
        (f"stages: [{{stage_id: 0, worker_cls: {AR}, devices: '0,1'}}]", "2 devices for 1"),
        (f"stages: [{{stage_id: 0, worker_cls: {AR}, num_replicas: 2, devices: '0,0'}}]", "twice"),
        (f"stages: [{{stage_id: 0, worker_cls: {AR}, data_parallel_size: 2}}]", "tensor_para"),
    ],
)
def test_what_makes_no_sense_is_named(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(tmp_path, text)


def test_two_stages_of_one_name_are_refused(tmp_path: Path) -> None:
    named = "{stage_id: %d, additional_config: {swapd: {component: talker}}}"
    text = f"stages: [{named % 0}, {named % 1}]"
    assert "several stages are called talker" in refused(tmp_path, text)
