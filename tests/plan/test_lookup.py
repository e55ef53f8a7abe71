"""The deploy file of a model, from the source of vLLM-Omni, which is never imported."""

import json
import stat
import sys
from pathlib import Path

import pytest

from swapd.plan import lookup
from swapd.plan.advise import PlanError
from swapd.run import interpreter

REGISTRY = """
from nothing_of_that_name import anything
from vllm_omni.models.tiny import ASKS, BARE, DIT, ODD, TINY, choose, TINY as ALIAS

OMNI_PIPELINES: dict[str, object] = {
    "tiny": TINY,
    "tiny_alias": ALIAS,
    "chosen": choose,
    "bare": BARE,
    "dit": DIT,
    "asks": ASKS,
    "odd": ODD,
    "gone": anything,
}
"""
PIPELINES = """
_ARCHITECTURES = ("TinyModel",)
TINY = PipelineConfig(
    model_type="tiny", default_deploy_config_name="tiny.yaml", hf_architectures=_ARCHITECTURES
)
FULL = PipelineConfig(model_type="chosen", default_deploy_config_name="full.yaml")
BARE = PipelineConfig(model_type="bare")
DIT = PipelineConfig(
    model_type="dit", default_deploy_config_name="full.yaml",
    diffusers_class_name="DitPipeline", diffusers_class_aliases=("OtherPipeline",),
)
ASKS = PipelineConfig(
    model_type="asks", default_deploy_config_name="tiny.yaml", hf_architectures=("Asked",),
    hf_config_predicate=lambda c: str(getattr(c, "version", "")) == "4.5",
)
ODD = PipelineConfig(
    model_type="odd", default_deploy_config_name="gone.yaml", hf_architectures=("Odd",),
    hf_config_predicate=lambda c: c.layers > 4,
)


@only_for(Config)
def choose(hf_config):
    if not hf_config.speaks:
        return BARE
    return FULL
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vLLM-Omni that fails when it is imported."""
    made = tmp_path_factory.mktemp("site") / "vllm_omni"
    for name, text in (
        ("__init__.py", "raise AssertionError('imported')"),
        ("config/pipeline_registry.py", REGISTRY),
        ("models/tiny.py", PIPELINES),
        ("deploy/tiny.yaml", ""),
        ("deploy/full.yaml", ""),
    ):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    return made


def found(package: Path, folder: Path, **config: object) -> tuple[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    said = lookup.deploy_file(package, folder)
    return said.path.name, said.why


@pytest.mark.parametrize(
    ("config", "name", "why"),
    [
        ({"model_type": "tiny"}, "tiny.yaml", "model_type tiny"),
        ({"model_type": "tiny_alias"}, "tiny.yaml", "model_type tiny_alias"),
        ({"architecture": "tiny"}, "tiny.yaml", "model_type tiny"),
        ({"model_type": "chosen"}, "full.yaml", "model_type chosen"),
        ({"model_type": "chosen", "speaks": True}, "full.yaml", "model_type chosen"),
        (
            {"model_type": "else", "architectures": ["TinyModel"]},
            "tiny.yaml",
            "architecture TinyModel",
        ),
        (
            {"model_type": "else", "architectures": ["Asked"], "version": 4.5},
            "tiny.yaml",
            "architecture Asked",
        ),
    ],
)
def test_a_model_s_type_or_architecture_says_which_file(
    package: Path, tmp_path: Path, config: dict[str, object], name: str, why: str
) -> None:
    assert found(package, tmp_path / "m", **config) == (name, why)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "else"}, "no pipeline is for model_type else"),
        ({"model_type": "else", "architectures": ["Asked"]}, "architectures Asked"),
        ({"model_type": "bare"}, "pipeline bare (model_type bare) has none of its own"),
        ({"model_type": "odd"}, "gone.yaml, that of odd (model_type odd), is not there"),
        (
            {"model_type": "chosen", "speaks": False},
            "several deploy files match chosen: full.yaml of chosen, none of bare; vllm-omni "
            "decides by speaks: False",
        ),
        (
            {"model_type": "else", "architectures": ["Odd"]},
            "gone.yaml of odd may match, if c.layers > 4",
        ),
        ({}, "has no model_type"),
    ],
)
def test_where_none_or_several_match_the_option_is_named(
    package: Path, tmp_path: Path, config: dict[str, object], said: str
) -> None:
    with pytest.raises(PlanError) as refused:
        found(package, tmp_path / "m", **config)
    assert said in str(refused.value)
    assert "--deploy-config FILE" in str(refused.value)


def test_a_pipeline_of_diffusers_is_found_by_its_class_and_the_rest_by_their_folders_names(
    package: Path, tmp_path: Path
) -> None:
    (model := tmp_path / "My-Tiny-2").mkdir()
    assert lookup.deploy_file(package, model).why == "tiny in its name"
    for cls in ("DitPipeline", "OtherPipeline"):
        (model / "model_index.json").write_text(json.dumps({"_class_name": cls}))
        assert lookup.deploy_file(package, model) == (
            package / "deploy" / "full.yaml",
            f"{cls} in model_index.json",
        )


def test_a_vllm_omni_without_such_a_registry_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no registry of pipelines"):
        lookup.deploy_file(tmp_path, tmp_path)


# --- the command's Python ----------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        f"#!{sys.executable}\n",
        "#!/usr/bin/env -S python3\n",
        f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_a_script_s_python_is_asked_and_imports_nothing(
    head: str, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    script = tmp_path / "vllm-omni"
    script.write_text(head)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    assert interpreter.folder_of("vllm_omni", [str(script), "serve"]) == package
    assert interpreter.folder_of("vllm_omni", [sys.executable, "-m", "vllm_omni"]) == package


def test_a_python_without_it_and_a_command_that_says_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="has no nothing_of_that_name"):
        interpreter.folder_of("nothing_of_that_name", [sys.executable, "-m", "x"])
    with pytest.raises(PlanError, match="there is no command 'no-such'"):
        interpreter.folder_of("vllm_omni", ["no-such"])
    script = tmp_path / "vllm-omni"
    script.write_bytes(b"\x7fELF\xff")
    script.chmod(0o755)
    with pytest.raises(PlanError, match="is unknown: its first line does not name one"):
        interpreter.folder_of("vllm_omni", [str(script)])
