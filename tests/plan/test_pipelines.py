"""Names and kinds of stages, from the source of vLLM-Omni, which is never imported."""

import sys
from pathlib import Path

import pytest

from swapd.plan import deploy, pipelines

SOURCE = """
import nothing_of_that_name

OMNI = PipelineConfig(
    model_type="tiny_omni",
    default_deploy_config_name="tiny.yaml",
    stages=(
        StagePipelineConfig(stage_id=0, model_stage="thinker", execution_type=Type.LLM_AR),
        StagePipelineConfig(stage_id=1, model_stage="code2wav", execution_type=Type.LLM_GENERATION),
        StagePipelineConfig(stage_id=2, model_stage="dit", execution_type=Type.DIFFUSION),
    ),
)
OTHER = PipelineConfig(
    model_type="tiny_other",
    stages=(StagePipelineConfig(stage_id=0, model_stage="ar"),),
)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A vLLM-Omni with one file of pipelines, and one that cannot be read."""
    made = tmp_path / "site" / "vllm_omni"
    for name, text in (("broken", "def ("), ("tiny", SOURCE)):
        (made / "model_executor" / "models" / name).mkdir(parents=True)
        (made / "model_executor" / "models" / name / "pipeline.py").write_text(text)
    (made / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return made


def test_a_deploy_file_belongs_to_the_pipeline_that_names_it(package: Path) -> None:
    assert pipelines.folder() == package
    assert pipelines.stages_of(None, ["mine.yaml", "tiny.yaml"]) == {
        0: ("thinker", "ar"),
        1: ("code2wav", "generation"),
        2: ("dit", "diffusion"),
    }
    assert "vllm_omni" not in sys.modules


def test_a_deploy_file_may_name_its_pipeline(package: Path) -> None:
    assert pipelines.stages_of("tiny_other", ["tiny.yaml"]) == {0: ("ar", "ar")}


def test_what_is_not_found_has_no_names(package: Path) -> None:
    assert pipelines.stages_of("nobody", ["tiny.yaml"]) == {}
    assert pipelines.stages_of(None, ["nobody.yaml"]) == {}


def test_a_stage_without_a_name_has_its_pipelines(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    swapd = "additional_config: {swapd: {component: mine}}"
    path.write_text(f"stages: [{{stage_id: 0}}, {{stage_id: 1, {swapd}}}, {{stage_id: 2}}]")
    found = deploy.read(path).stages
    assert [(s.name, s.kind) for s in found] == [
        ("thinker", "ar"),
        ("mine", "generation"),
        ("dit", "diffusion"),
    ]
