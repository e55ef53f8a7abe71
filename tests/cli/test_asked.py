"""Offloading as users of vLLM-Omni ask for it: in a file of `stage_args`, or by flags.

The files and the command lines are theirs, as they stand.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from swapd.cli.plan import deploy_of
from swapd.cli.plan_vllm import PlanOptions, StageFile, reports_of
from tests import fakecuda
from tests.plan import omni
from tests.plan.test_hub import put

from .conftest import MIB, swapd

GIB = 1 << 30
AR = "swapd_client.vllm.omni.ARWorker"
GENERATION = "swapd_client.vllm.omni.GenerationWorker"

ONE_STAGE_WITH_ITS_ENCODERS = """
stage_args:
  - stage_id: 0
    engine_args:
      model_arch: Qwen2_5OmniForConditionalGeneration
      cpu_offload_enabled: true
      cpu_offload_components: ["visual", "audio_tower"]
      cpu_offload_strategy: "alternating"
"""
TWO_STAGES = """
stage_args:
  - stage_id: 0
    engine_args:
      model_stage: thinker
      cpu_offload_enabled: false  # Keep thinker on GPU
  - stage_id: 1
    engine_args:
      model_stage: talker
      cpu_offload_enabled: true
      cpu_offload_components: ["visual"]
"""
THREE_STAGES = """
stage_args:
  - stage_id: 0
    engine_args:
      model_stage: thinker
      cpu_offload_enabled: false  # Keep thinker on GPU (used frequently)
  - stage_id: 1
    engine_args:
      model_stage: talker
      cpu_offload_enabled: true
      cpu_offload_components: ["visual"]  # Offload visual encoder only
      cpu_offload_strategy: "alternating"
  - stage_id: 2
    engine_args:
      model_stage: code2wav
      cpu_offload_enabled: true  # Offload code2wav when not in use
"""
SERVE = r"""
vllm-omni serve Qwen/Qwen2.5-Omni-7B --omni \
  --cpu-offload-enabled \
  --cpu-offload-components thinker,talker \
  --cpu-offload-strategy alternating
"""
WITHOUT_SERVE = r"""
vllm-omni --model qwen2.5-omni \
  --cpu-offload-enabled \
  --cpu-offload-components thinker,talker \
  --cpu-offload-strategy alternating
"""

ON: dict[str, Any] = {"cpu_offload_enabled": True}
OFF: dict[str, Any] = {"cpu_offload_enabled": False}
ENCODERS = {**ON, "cpu_offload_components": ["visual", "audio_tower"]}
ALTERNATING = {"cpu_offload_strategy": "alternating"}
NO_VISUAL = "stage 1 (talker) has no visual that could be offloaded\n"

#: A decoder, and its sizes in bytes, of which a card of 12 GiB holds all stages.
_TEXT = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
CONFIG = {
    "model_type": "qwen2_5_omni",
    "thinker_config": {"text_config": _TEXT},
    "talker_config": _TEXT,
}
SIZES = {
    **{f"thinker.model.layers.{n}.w": 16 * MIB for n in range(4)},
    "thinker.visual.w": 8 * MIB,
    "thinker.audio_tower.w": 8 * MIB,
    **{f"talker.model.layers.{n}.w": 8 * MIB for n in range(4)},
    "token2wav.w": 16 * MIB,
}


@pytest.fixture(autouse=True)
def card(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fakecuda.Fake]:
    """A machine that shows one GPU of 24 GiB, and a vllm-omni that prints its words."""
    site = tmp_path / "site"
    (empty := tmp_path / "empty.yaml").write_text("stages: []")
    omni.installed(site, empty)
    (home := tmp_path / "home").mkdir()
    with fakecuda.machine(devices=16, total=24 * GIB) as fake:
        for name, value in {
            **fake.environment(),
            "CUDA_VISIBLE_DEVICES": "9",
            "HOME": str(home),
            "HF_HOME": str(tmp_path / "hf"),
            "XDG_RUNTIME_DIR": str(folder),
            "XDG_STATE_HOME": str(tmp_path / "state"),
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", str(site), prepend=":")
        monkeypatch.chdir(tmp_path)
        yield fake


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of the model, under the name in the second command line."""
    return omni.write(tmp_path / "qwen2.5-omni", CONFIG, SIZES)


def file(tmp_path: Path, text: str) -> Path:
    (path := tmp_path / "stages.yaml").write_text(text)
    return path


def overlay_in(printed: str) -> dict[str, Any]:
    """The overlay that a dry run prints."""
    text = printed.partition(".yaml\n")[2].rpartition("vllm-omni serve")[0]
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def options_in(overlay: dict[str, Any], site: Path) -> list[dict[str, Any]]:
    """swapd's options of each stage, in an overlay over the model's own file."""
    assert overlay["base_config"] == str(site / "vllm_omni" / "deploy" / "qwen2_5.yaml")
    assert "stage_args" not in overlay
    assert [s["worker_cls"] for s in overlay["stages"]] == [AR, AR, GENERATION]
    found = [s.get("additional_config", {}).get("swapd", {}) for s in overlay["stages"]]
    return [{k: v for k, v in one.items() if k != "kv"} for one in found]


FILES = [
    pytest.param(ONE_STAGE_WITH_ITS_ENCODERS, [ENCODERS | ALTERNATING, {}, {}], "", id="encoders"),
    pytest.param(TWO_STAGES, [OFF, OFF, {}], NO_VISUAL, id="two stages"),
    pytest.param(THREE_STAGES, [OFF, OFF, ON], NO_VISUAL, id="three stages"),
]


@pytest.mark.parametrize(("text", "options", "said"), FILES)
def test_run_makes_the_overlay_of_a_file_of_stage_args(
    tmp_path: Path, model: Path, text: str, options: list[dict[str, Any]], said: str
) -> None:
    path = file(tmp_path, text)
    words = ("vllm-omni", "serve", model, "--omni", "--deploy-config", path)
    done = swapd("run", "-n", "--", *words)
    assert options_in(overlay_in(done.stdout), tmp_path / "site") == options
    assert done.stderr.endswith(f"swapd: {path}: {said}" if said else "model_type qwen2_5_omni\n")


def test_plan_makes_the_same_overlay_of_it(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file(tmp_path, THREE_STAGES)
    said = refused("plan", "--vllm", path, model, "--device-memory", "24GiB")
    assert "stage_args, for a deploy file of vllm-omni: install it here" in said
    said = refused("plan", "--vllm", path, "thinker=1GiB", "--device-memory", "24GiB")
    assert "for a deploy file of vllm-omni: name the model" in said
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    found = StageFile(deploy_of(path, [str(model)]), [str(model)])
    (report,) = reports_of([found], PlanOptions(24 << 30, bandwidth=25e9)).reports
    assert options_in(yaml.safe_load(report.overlay), site) == [OFF, OFF, ON]


def served(line: str) -> tuple[list[str], dict[str, Any]]:
    """The words that vllm-omni was started with, without its overlay, and that overlay."""
    words = line.split()
    at = words.index("--deploy-config")
    overlay: dict[str, Any] = yaml.safe_load(Path(words[at + 1]).read_text())
    return words[:at] + words[at + 2 :], overlay


def test_a_server_runs_with_a_file_of_three_stages(
    tmp_path: Path, model: Path, card: fakecuda.Fake
) -> None:
    path = file(tmp_path, THREE_STAGES)
    done = swapd("run", "--", "vllm-omni", "serve", model, "--omni", f"--deploy-config={path}")
    words, overlay = served(done.stdout)
    assert words == ["serve", str(model), "--omni"]
    assert options_in(overlay, tmp_path / "site") == [OFF, OFF, ON]
    assert "swapd on cuda:0 at " in done.stderr
    assert card.held_bytes(9) == 0


@pytest.mark.parametrize(
    ("line", "served_as"),
    [
        (SERVE, ["serve", "Qwen/Qwen2.5-Omni-7B", "--omni"]),
        (WITHOUT_SERVE, ["serve", "--model", "qwen2.5-omni", "--omni"]),
    ],
)
def test_a_server_runs_with_the_flags_of_its_command_line(
    tmp_path: Path, model: Path, line: str, served_as: list[str]
) -> None:
    cached = put(tmp_path / "hf" / "hub", model="Qwen/Qwen2.5-Omni-7B")
    for one in cached.iterdir():
        one.unlink()
    for one in model.iterdir():
        (cached / one.name).symlink_to(one)
    done = swapd("run", "--", *shlex.split(line.replace("\\\n", " ")))
    words, overlay = served(done.stdout)
    assert words == served_as
    assert options_in(overlay, tmp_path / "site") == [ON, ON, OFF]


def refused(*words: object) -> str:
    return swapd(*words, status=1).stderr


def test_what_cannot_be_done_is_said_before_anything_starts(tmp_path: Path, model: Path) -> None:
    serve = ("vllm-omni", "serve", model, "--omni")
    said = refused("run", "--", *serve, f"--deploy-config={file(tmp_path, TWO_STAGES)}x")
    assert "stages.yamlx: No such file" in said
    path = file(tmp_path, TWO_STAGES.replace("model_stage: talker", "model_stage: tolker"))
    said = refused("run", "--", *serve, "--deploy-config", path)
    assert f"{path}: stage 1 (tolker): the model has no stage 'tolker'; by " in said
    assert "its stages are 0 (thinker), 1 (talker), 2 (code2wav)" in said
    flags = ("--cpu-offload-enabled", "--cpu-offload-components")
    said = refused("run", "--", *serve, *flags, "visuals")
    assert "the model has no visuals; its stages are 0 (thinker), 1 (talker), 2" in said
    said = refused("run", "-d", "host", "--", *serve, *flags, "talker")
    assert "cpu_offload settings are for stages on GPUs" in said
    path = file(tmp_path, TWO_STAGES)
    assert said == refused("run", "-d", "host", "--", *serve, "--deploy-config", path)
    said = refused("run", "--compare", "--for", "1", "--", *serve, "--deploy-config", path)
    assert f"--deploy-config {path} needs swapd, so it cannot run without" in said
