"""An installed vLLM-Omni is asked, in the Python that runs it, for deploy files and stages."""

import json
import sys
from pathlib import Path

import pytest

from swapd.plan import deploy
from swapd.plan import omni as offload_flags
from swapd.plan.advice import PlanError
from tests.plan import omni


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (path := tmp_path / "base.yaml").write_text(json.dumps({"stages": [{"stage_id": 0}]}))
    return path


@pytest.fixture
def command(tmp_path: Path, base: Path) -> Path:
    return omni.installed(tmp_path / "site", base)


def model(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_has_the_deploy_file_that_vllm_omni_chooses(command: Path, tmp_path: Path) -> None:
    found = offload_flags.of_command(
        [str(command)], [str(model(tmp_path / "m", model_type="tiny"))]
    )
    deploy_folder = tmp_path / "site" / "vllm_omni" / "deploy"
    assert found.deploy_file() == (deploy_folder / "tiny.yaml", "model_type tiny")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bare"}, "its pipeline bare (model_type bare) has none of its own"),
        ({"model_type": "nobodys"}, "no pipeline is for model_type nobodys"),
        ({}, "no pipeline is for its name, org/My-Model"),
    ],
)
def test_a_model_without_one_is_refused_with_the_option_to_name_one(
    command: Path, tmp_path: Path, config: dict[str, object], said: str
) -> None:
    models = [str(model(tmp_path / "m", **config)), "org/My-Model"]
    with pytest.raises(PlanError) as refused:
        offload_flags.of_command([str(command)], models).deploy_file()
    assert said in str(refused.value)
    assert "--deploy-config FILE, one of " in str(refused.value)


def test_stages_have_the_names_and_kinds_of_their_pipeline(command: Path, tmp_path: Path) -> None:
    found = offload_flags.of_command([str(command)])
    swapd = "additional_config: {swapd: {component: mine}}"
    (path := tmp_path / "tiny.yaml").write_text(
        f"stages: [{{stage_id: 0}}, {{stage_id: 1, {swapd}}}, {{stage_id: 2}}]"
    )
    stages = deploy.read(path, installed=found).stages
    assert [(s.name, s.kind) for s in stages] == [
        ("thinker", "ar"),
        ("mine", "generation"),
        ("dit", "diffusion"),
    ]
    (path := tmp_path / "other.yaml").write_text("pipeline: bare\nstages: [{stage_id: 0}]")
    assert [s.name for s in deploy.read(path, installed=found).stages] == ["painter"]
    path.write_text("stages: [{stage_id: 0}]")
    assert [s.name for s in deploy.read(path, installed=found).stages] == ["stage0"]


def test_a_file_that_names_all_is_read_without_an_import(base: Path, tmp_path: Path) -> None:
    broken = offload_flags.of_command([str(omni.installed(tmp_path / "bad", base, works=False))])
    path = tmp_path / "named.yaml"
    worker = "worker_cls: swapd_client.vllm.omni.GenerationWorker"
    path.write_text(
        f"stages: [{{stage_id: 0, {worker}, additional_config: {{swapd: {{component: a}}}}}}]"
    )
    (stage,) = deploy.read(path, installed=broken).stages
    assert (stage.name, stage.kind) == ("a", "generation")
    path.write_text(f"stages: [{{stage_id: 0, {worker}}}]")
    with pytest.raises(PlanError, match=r"no libcuda.*whose stages all name swapd's workers"):
        deploy.read(path, installed=broken)


# --- the command's Python ----------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        f"#!{sys.executable}\n",
        "#!/usr/bin/env -S python3\n",
        f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_a_script_s_python_is_asked(
    head: str, command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(command.parent))
    (script := tmp_path / "vllm-omni").write_text(head)
    script.chmod(0o755)
    for words in ([str(script), "serve"], [sys.executable, "-m", "vllm_omni"]):
        assert offload_flags.of_command(words).folder == command.parent / "vllm_omni"


def test_a_python_without_it_and_a_command_that_says_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no vllm_omni.*--deploy-config FILE"):
        offload_flags.of_command([sys.executable, "-m", "x"])
    with pytest.raises(PlanError, match=r"there is no command 'no-such'"):
        offload_flags.of_command(["no-such"])
    (script := tmp_path / "vllm-omni").write_bytes(b"\x7fELF\xff")
    script.chmod(0o755)
    with pytest.raises(PlanError, match="is unknown: its first line does not name one"):
        offload_flags.of_command([str(script)])
