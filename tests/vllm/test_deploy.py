"""The deploy files of this project, through vLLM-Omni's own loader."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from swapd.cli.app import app_of
from swapd.plan import deploy, snippets
from swapd.plan import omni as offload_flags
from swapd_client.vllm.options import options_of
from tests.plan import omni
from tests.vllm.engines import Nursery
from tests.vllm.environment import ROOT, environment

VLLM_OMNI = Path(sys.executable).with_name("vllm-omni")

OVERLAYS = {
    "qwen2_5_omni": "swapd_qwen2_5_omni.yaml",
    "qwen3_omni_moe": "swapd_qwen3_omni.yaml",
    "wan2_2_ti2v": "swapd_wan2_2.yaml",
}
#: Options of the first pipeline's first stage, one for each file.
MISTAKES: tuple[dict[str, object], ...] = (
    {"cpu_offload_enabled": True},
    {"cpu_offload_gb": 4.0},
    {"swapd": {}},
)


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> dict[str, Any]:
    """The loader's result for each overlay, as `swapd plan --vllm --overlay` prints it."""
    folder = tmp_path_factory.mktemp("deploy")
    files = []
    for pipeline, name in OVERLAYS.items():
        found = deploy.read(ROOT / "deploy" / "vllm-omni" / name)
        (folder / name).write_text(snippets.overlay(found, {}))
        files.append((pipeline, str(folder / name)))
    base = yaml.safe_load((folder / "swapd_qwen2_5_omni.yaml").read_text())["base_config"]
    for number, mistake in enumerate(MISTAKES):
        path = folder / f"mistake{number}.yaml"
        stage: dict[str, object] = {"stage_id": 0, **mistake}
        path.write_text(yaml.safe_dump({"base_config": base, "stages": [stage]}))
        files.append(("qwen2_5_omni", str(path)))
    said = nursery.call("tests.vllm.resolve:resolve", files)
    names = [*OVERLAYS, *(next(iter(m)) for m in MISTAKES)]
    return dict(zip(names, said, strict=True))


@pytest.fixture
def in_nursery(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM-Omni is asked where it was imported before; a new Python would take ten seconds."""

    def output(words: list[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
        program, *arguments = words[words.index("-c") + 1 :]
        out = nursery.call("tests.vllm.resolve:printed", program, arguments)
        return subprocess.CompletedProcess(words, 0, out, "")

    monkeypatch.setattr(offload_flags, "_output", output)


@pytest.mark.parametrize("pipeline", OVERLAYS)
def test_every_key_arrives_in_its_stages_engine_arguments(
    pipeline: str, resolved: dict[str, Any]
) -> None:
    mine = yaml.safe_load((ROOT / "deploy" / "vllm-omni" / OVERLAYS[pipeline]).read_text())
    stages = resolved[pipeline]
    assert isinstance(stages, list), stages
    assert len(stages) == len(mine["stages"])
    for written, arguments in zip(mine["stages"], stages, strict=True):
        assert {key: arguments[key] for key in written} == written
        assert options_of(arguments["additional_config"], pipeline).component
    streams = pipeline == "qwen3_omni_moe"  # as in vllm-omni's files
    assert all(bool(arguments.get("async_chunk")) == streams for arguments in stages)


@pytest.mark.parametrize("pipeline", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_workers_are_of_the_kind_their_stages_are(pipeline: str, resolved: dict[str, Any]) -> None:
    kinds = [(a["model_stage"], a["worker_type"], a["worker_cls"]) for a in resolved[pipeline]]
    assert kinds == [
        ("thinker", "ar", deploy.WORKERS["ar"]),
        ("talker", "ar", deploy.WORKERS["ar"]),
        ("code2wav", "generation", deploy.WORKERS["generation"]),
    ]


def test_qwen3s_code2wav_captures_no_graphs_while_it_loads(resolved: dict[str, Any]) -> None:
    assert [a["enforce_eager"] for a in resolved["qwen3_omni_moe"]] == [False, False, True]


def test_the_plan_reads_what_the_loader_reads(resolved: dict[str, Any]) -> None:
    for pipeline, name in OVERLAYS.items():
        found = deploy.read(ROOT / "deploy" / "vllm-omni" / name)
        for stage, arguments in zip(found.stages, resolved[pipeline], strict=True):
            assert stage.id == arguments["stage_id"]
            assert ",".join(map(str, stage.gpus)) == arguments["devices"]
            assert stage.utilization == arguments["gpu_memory_utilization"]
            assert stage.graphs == (not arguments["enforce_eager"])


def test_the_plan_calls_stages_what_their_pipelines_call_them(
    resolved: dict[str, Any], in_nursery: None
) -> None:
    installed = offload_flags.of_this_python()
    assert installed is not None
    for pipeline, name in OVERLAYS.items():
        mine = yaml.safe_load((ROOT / "deploy" / "vllm-omni" / name).read_text())
        bases = [name, mine["base_config"]]
        known = installed.stages_of(mine.get("pipeline"), bases)
        said = {number: called for number, (called, _) in known.items()}
        assert said == {a["stage_id"]: a["model_stage"] for a in resolved[pipeline]}
        workers = [a.get("worker_cls") or a["worker_extension_cls"] for a in resolved[pipeline]]
        assert [deploy.WORKERS[kind] for _, kind in known.values()] == workers


@pytest.mark.parametrize("key", [next(iter(m)) for m in MISTAKES])
def test_settings_in_the_stage_itself_are_refused_by_the_loader(
    key: str, resolved: dict[str, Any]
) -> None:
    assert f"no structured config owner: {key}" in resolved[key]


def dry_run(model: Path, *words: object) -> list[str]:
    """The words of a `swapd run` that would serve a model with these words of vllm-omni."""
    before = ("run", "--dry-run", "-d", "cuda:7", "--device-memory", "141GiB", "--", VLLM_OMNI)
    return [*map(str, (*before, "serve", model, "--omni", *words))]


def overlay_in(out: str) -> str:
    """The overlay that it makes."""
    return out[out.index("base_config: ") : out.index(str(VLLM_OMNI))]


def test_a_model_alone_is_enough_for_a_run_and_the_loader_reads_what_it_writes(
    tmp_path: Path, nursery: Nursery
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swapd", *dry_run(omni.qwen3(tmp_path / "Qwen3-Omni"))],
        env=environment(XDG_STATE_HOME=str(tmp_path / "state")),
        capture_output=True,
        text=True,
        check=True,
    )
    assert not (tmp_path / "state").exists()
    assert "vllm_omni/deploy/qwen3_omni_moe.yaml: model_type qwen3_omni_moe" in done.stderr
    (overlay := tmp_path / "deploy.yaml").write_text(overlay_in(done.stdout))
    (stages,) = nursery.call("tests.vllm.resolve:resolve", [("qwen3_omni_moe", str(overlay))])
    assert [(a["model_stage"], a["worker_cls"], a["devices"]) for a in stages] == [
        ("thinker", deploy.WORKERS["ar"], "7"),
        ("talker", deploy.WORKERS["ar"], "7"),
        ("code2wav", deploy.WORKERS["generation"], "7"),
    ]
    assert [a["enforce_eager"] for a in stages] == [False, False, True]


STAGE_ARGS = """
stage_args:
  - stage_id: 0
    engine_args:
      model_stage: thinker
      cpu_offload_enabled: false
  - stage_id: 2
    engine_args:
      model_stage: code2wav
      cpu_offload_enabled: true
"""


def test_the_loader_reads_what_a_run_makes_of_flags_and_of_stage_args(
    tmp_path: Path, nursery: Nursery, in_nursery: None
) -> None:
    model = omni.write(tmp_path / "Qwen2.5-Omni-7B", omni.QWEN2_5, omni.QWEN2_5_BYTES)
    (old := tmp_path / "old.yaml").write_text(STAGE_ARGS)
    flags = ("--cpu-offload-enabled", "--cpu-offload-components", "thinker,talker")
    files = []
    for number, words in enumerate((flags, ("--deploy-config", old))):
        done = CliRunner().invoke(app_of(), dry_run(model, *words))
        assert done.exit_code == 0, done.output
        (path := tmp_path / f"{number}.yaml").write_text(overlay_in(done.stdout))
        files.append(("qwen2_5_omni", str(path)))
    resolved = nursery.call("tests.vllm.resolve:resolve", [*files, ("qwen2_5_omni", str(old))])
    *both, refused = resolved
    options = [[options_of(a.get("additional_config"), "") for a in stages] for stages in both]
    on, off, unsaid = (True, True), (False, True), (False, False)
    assert [
        [(one.offload.cpu_offload_enabled, one.offload_said) for one in stages]
        for stages in options
    ] == [[on, on, off], [off, unsaid, on]]
    assert "removed `stage_args` schema" in refused
