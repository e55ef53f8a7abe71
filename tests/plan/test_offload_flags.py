"""Settings for offloading become options of the stages that they are about."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from swapd.plan import deploy, offload_flags
from swapd.plan.advice import PlanError
from swapd.plan.deploy import BadDeploy, Deploy
from swapd.run import servers
from swapd.run.commands import command_of
from swapd.run.servers import DeployFile
from swapd.shared.config import ConfigError
from swapd_client.offload.settings import OffloadSettings, SettingsWarning
from tests.plan import omni, test_sizes

ON: dict[str, Any] = {"cpu_offload_enabled": True}
OFF: dict[str, Any] = {"cpu_offload_enabled": False}
FLAGS = ("--cpu-offload-enabled", "--cpu-offload-components")


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return omni.qwen3(tmp_path / "model")


def deployed(folder: Path, *names: str) -> Deploy:
    """A deploy file with stages of these names; one called dit is of diffusion."""
    dit = {"worker_extension_cls": deploy.WORKERS["diffusion"]}
    stages = [
        {
            "stage_id": number,
            **(dit if name == "dit" else {"worker_cls": deploy.WORKERS["ar"]}),
            "additional_config": {"swapd": {"component": name}},
        }
        for number, name in enumerate(names)
    ]
    (path := folder / "deploy.yaml").write_text(yaml.safe_dump({"stages": stages}))
    return deploy.read(path)


def of_flags(found: Deploy, model: Path, *flags: str) -> list[dict[str, Any]]:
    offload, _ = offload_flags.taken_off(flags)
    return list(offload_flags.of_flags(offload, found, model).values())


def of_file(folder: Path, found: Deploy, text: str) -> tuple[dict[int, dict[str, Any]], list[str]]:
    (path := folder / "stages.yaml").write_text(text)
    return offload_flags.of_stages(offload_flags.in_file(path), found, folder)


# --- flags -----------------------------------------------------------------------------------


def test_named_stages_take_turns_and_parts_are_of_the_stages_that_have_them(
    tmp_path: Path, qwen3: Path
) -> None:
    found = deployed(tmp_path, "thinker", "talker", "code2wav")
    assert of_flags(found, qwen3) == [], "without the switch, nothing is asked"
    assert of_flags(found, qwen3, FLAGS[0]) == [ON, ON, ON]
    assert of_flags(found, qwen3, *FLAGS, "talker,token2wav") == [OFF, ON, ON]
    visual = {**ON, "cpu_offload_components": ["visual"]}
    assert of_flags(found, qwen3, *FLAGS, "visual") == [visual, OFF, OFF]
    both = {**ON, "cpu_offload_components": ["thinker", "audio_tower"]}
    assert of_flags(found, qwen3, *FLAGS, "thinker,audio_tower,talker") == [both, ON, OFF]
    language = {**ON, "cpu_offload_components": ["language_model"]}
    assert of_flags(found, qwen3, *FLAGS, "language_model")[:2] == [language, language]
    sequential = (*FLAGS, "talker", "--cpu-offload-strategy", "sequential")
    assert of_flags(found, qwen3, *sequential)[1] == {**ON, "cpu_offload_strategy": "sequential"}
    with pytest.raises(PlanError, match=r"no visuals; its stages are 0 \(thinker\), 1 \(talker\)"):
        of_flags(found, qwen3, *FLAGS, "thinker,visuals")


def test_a_model_of_one_stage_has_the_parts_in_its_files(tmp_path: Path) -> None:
    test_sizes.save(tmp_path / "m" / "model.safetensors", **{"model.visual.w": 1, "visualize.w": 1})
    found, visual = deployed(tmp_path, "llm"), {**ON, "cpu_offload_components": ["visual"]}
    assert of_flags(found, tmp_path / "m", *FLAGS, "visual") == [visual]
    with pytest.raises(PlanError, match="no visualiz;"):
        of_flags(found, tmp_path / "m", *FLAGS, "visualiz")


def test_a_pipeline_has_its_components(tmp_path: Path) -> None:
    model, names = tmp_path / "m", ("transformer", "vae")
    for name in names:
        test_sizes.save(model / name / "model.safetensors", w=1)
    (model / "model_index.json").write_text(json.dumps({one: ["diffusers", "A"] for one in names}))
    (options,) = of_flags(deployed(tmp_path, "dit"), model, *FLAGS, "trans*")
    assert options == {**ON, "cpu_offload_components": ["trans*"]}


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--port", "1", FLAGS[0], "-tp", "2"], ["--port", "1", "-tp", "2"]),
        ([f"{FLAGS[1]}=a,b", *FLAGS[:1], "--", "-z"], ["--", "-z"]),
        (["--cpu-offload-gb", "4"], ["--cpu-offload-gb", "4"]),
        (["--offload-group-size=8"], ["--offload-group-size=8"]),
        (["--enable-cpu-offload"], ["--enable-cpu-offload"]),
        (["--enable-layerwise-offload"], ["--enable-layerwise-offload"]),
        (["--cpu-offload-params", "w"], ["--cpu-offload-params", "w"]),
    ],
)
def test_flags_that_vllm_omni_knows_stay_on_its_command(words: list[str], left: list[str]) -> None:
    command = command_of(["vllm-omni", "serve", "m", "--omni", *words])
    assert command.words == ("vllm-omni", "serve", "m", "--omni", *left)
    assert command.offload.cpu_offload_enabled is (FLAGS[0] in words)
    for other in ("vllm", "train"):
        assert command_of([other, "serve", "m", *words]).words == (other, "serve", "m", *words)


def test_a_server_may_be_called_by_its_model_alone() -> None:
    words = command_of(["vllm-omni", "--model", "m", "--port", "1"]).words
    assert words == ("vllm-omni", "serve", "--model", "m", "--port", "1", "--omni")
    words = command_of(["/bin/vllm-omni", "--omni", "--model=m"]).words
    assert words == ("/bin/vllm-omni", "serve", "--omni", "--model=m")
    assert command_of(["vllm-omni", "bench", "--model", "m"]).kind == "other"
    assert command_of(["vllm-omni", "--version"]).words == ("vllm-omni", "--version")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cpu-offload-component", "a"], "did you mean cpu_offload_components?"),
        (["--cpu-offload-enable=1"], "did you mean cpu_offload_enabled?"),
        (["--cpu-offload-components"], "--cpu-offload-components: expected one argument"),
        (["--cpu-offload-strategy", "none"], "invalid choice: 'none'"),
        (["--cpu-offload-components", "a"], "needs --cpu-offload-enabled: add it"),
    ],
)
def test_flags_that_mean_nothing_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        offload_flags.taken_off(words)
    assert said in str(refused.value)


def test_pinning_is_the_daemons(tmp_path: Path) -> None:
    with pytest.warns(SettingsWarning, match="--pin-limit"):
        offload, left = offload_flags.taken_off(["--no-cpu-offload-pin-memory", FLAGS[0]])
    assert left == ()
    assert offload_flags.of_flags(offload, deployed(tmp_path, "a"), tmp_path) == {0: ON}
    assert offload_flags.of_flags(OffloadSettings(), deployed(tmp_path, "a"), tmp_path) == {}


def test_flags_go_over_what_a_deploy_file_with_swapds_workers_says(
    tmp_path: Path, qwen3: Path
) -> None:
    worker, said = {"worker_cls": deploy.WORKERS["ar"]}, {"component": "talker", "kv": "auto"}
    stage = {"stage_id": 1, **worker, "additional_config": {"swapd": said, "x": 1}}
    (path := tmp_path / "deploy.yaml").write_text(yaml.safe_dump({"stages": [stage]}))
    flags, _ = offload_flags.taken_off([*FLAGS, "talker"])
    own, _ = servers.with_workers(DeployFile(path, None), (0,), qwen3, flags)
    (stage,) = deploy.read(tmp_path / "over.yaml", own).whole["stages"]
    both = {"swapd": {**said, **ON}, "x": 1}
    assert stage == {"stage_id": 1, **worker, "additional_config": both}
    assert servers.with_workers(DeployFile(path, None), (0,), qwen3) == (None, [])


# --- files -----------------------------------------------------------------------------------


def test_stages_are_found_by_name_before_their_number(tmp_path: Path) -> None:
    found = deployed(tmp_path, "thinker", "talker")
    text = """
    stage_args:
      - {stage_id: 7, engine_args: {model_stage: talker, cpu_offload_enabled: true}}
      - {stage_id: 0, engine_args: {model_arch: A, cpu_offload_gb: 2}}
    """
    assert of_file(tmp_path, found, text) == ({1: ON, 0: {"cpu_offload_gb": 2.0}}, [])


def test_what_is_no_setting_for_offloading_is_said_to_be_left_out(tmp_path: Path) -> None:
    text = """
    stage_args:
      - stage_id: 0
        runtime: {devices: "1"}
        engine_args: {model_stage: thinker, max_num_seqs: 4, cpu_offload_enabled: true}
    """
    options, (said,) = of_file(tmp_path, deployed(tmp_path, "thinker"), text)
    assert options == {0: ON}
    assert "stages.yaml: stage 0 (thinker): runtime, max_num_seqs left out: only set" in said


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("[{stage_id: 2, engine_args: {}}]", "no stage '2'; by .*are 0 .thinker., 1 .talker."),
        ("[{stage_id: 0}, {engine_args: {model_stage: thinker}}]", "is listed twice"),
        ("[{stage_id: 0, engine_args: {cpu_ofload_enabled: true}}]", "mean cpu_offload_enabled"),
        ("[{stage_id: 0, engine_args: {cpu_offload_component: [a]}}]", "mean cpu_offload_comp"),
        ("[]", "lists no stages"),
    ],
)
def test_a_file_that_means_nothing_is_refused(tmp_path: Path, stages: str, said: str) -> None:
    with pytest.raises((BadDeploy, PlanError), match=said):
        of_file(tmp_path, deployed(tmp_path, "thinker", "talker"), f"stage_args: {stages}")


def test_other_files_list_nothing_here(tmp_path: Path) -> None:
    assert offload_flags.in_file(tmp_path / "none.yaml") == []
    (path := tmp_path / "deploy.yaml").write_text("stages: [{stage_id: 0}]")
    assert offload_flags.in_file(path) == []
