"""`swapd plan --vllm`, as its users run it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.plan.test_sizes import save

from .conftest import MIB, swapd

DEPLOY = Path(__file__).parents[2] / "deploy" / "vllm-omni"
GIB = 1 << 30
CARD = ("--device-memory", "80GiB", "--bandwidth", "25GB/s")
QWEN3 = ("thinker=60GiB", "talker=8.5GiB", "code2wav=0.41GiB")
AR = "swapd_client.vllm.omni.ARWorker"


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    """The overlay beside a base file like the one it names."""
    stages = [{"stage_id": n, "devices": str(n), "gpu_memory_utilization": 0.9} for n in range(3)]
    base = {"async_chunk": True, "stages": stages}
    (tmp_path / "qwen3_omni_moe.yaml").write_text(yaml.safe_dump(base))
    path = tmp_path / "qwen3_omni.yaml"
    path.write_text((DEPLOY / "swapd_qwen3_omni.yaml").read_text())
    return path


def plan(*words: object) -> Any:
    return json.loads(swapd("plan", "--vllm", *words, "--json").stdout)


def refused(*words: object) -> str:
    return swapd("plan", "--vllm", *words, status=1).stderr


def test_qwen3_omni_on_80_gib_takes_turns(qwen3: Path) -> None:
    report = plan(qwen3, *QWEN3, *CARD)
    (gpu,) = report["gpus"]
    assert report["serve"] == ["swapd serve --device cuda:0 --budget 62GiB"]
    assert report["utilization"] == {"0": 0.05, "1": 0.05, "2": 0.025}
    assert [s["takes_turns"] for s in gpu["shares"]] == [True, True, True]
    assert gpu["moved_bytes"] == pytest.approx(68.5 * GIB)
    taken = gpu["budget_bytes"] + sum(s["room_bytes"] for s in gpu["shares"])
    assert taken + sum(t["nbytes"] for t in gpu["beside"]) <= 80 * GIB


def test_people_are_told_the_sum_the_turns_and_what_to_paste(qwen3: Path) -> None:
    shown = swapd("plan", "--vllm", qwen3, *QWEN3, *CARD).stdout
    assert "GPU 0: 80 GiB - 2 GiB CUDA contexts of 4 processes - 4 GiB CUDA graphs of" in shown
    assert "leaves 62 GiB for weights, counted once" in shown
    assert "thinker, talker, code2wav take turns: 68.91 GiB of weights" in shown
    assert "waits 2.94 s for it" in shown
    assert "host memory for the copies of all weights: 68.91 GiB" in shown
    assert "swapd serve --device cuda:0 --budget 62GiB" in shown
    assert "gpu_memory_utilization: 0.05" in shown


def test_the_page_shows_what_is_printed(qwen3: Path) -> None:
    page = (DEPLOY / "README.md").read_text()
    shown = page.partition("--device-memory 80GiB\n")[2].partition("\n...\n")[0].split()
    printed = swapd("plan", "--vllm", qwen3, *QWEN3, *CARD).stdout.split()
    assert shown == printed[: len(shown)]


def test_what_fits_has_its_kv_caches_grow(qwen3: Path) -> None:
    report = plan(qwen3, *QWEN3, "--device-memory", "141GiB", "--room", "talker=6GiB")
    (gpu,) = report["gpus"]
    rooms = {s["name"]: s["room_bytes"] / GIB for s in gpu["shares"]}
    assert gpu["moved_bytes"] == 0
    assert rooms["talker"] == 6
    assert rooms["thinker"] > 50
    shown = swapd("plan", "--vllm", qwen3, *QWEN3, "--device-memory", "141GiB").stdout
    assert "fit: nothing is moved, nobody waits" in shown


def test_the_deploy_file_alone_can_be_kept(qwen3: Path, tmp_path: Path) -> None:
    made = tmp_path / "elsewhere" / "made.yaml"
    made.parent.mkdir()
    made.write_text(swapd("plan", "--vllm", qwen3, *QWEN3, *CARD, "--overlay").stdout)
    own = yaml.safe_load(made.read_text())
    assert own["base_config"] == str((tmp_path / "qwen3_omni_moe.yaml").resolve())
    assert own["async_chunk"] is False
    assert [s["gpu_memory_utilization"] for s in own["stages"]] == [0.05, 0.05, 0.025]
    assert own["stages"][0]["worker_cls"] == AR
    assert plan(made, *QWEN3, *CARD)["utilization"] == {"0": 0.05, "1": 0.05, "2": 0.025}


def test_async_chunk_is_advised_against_where_stages_take_turns(qwen3: Path) -> None:
    qwen3.write_text(qwen3.read_text().replace("async_chunk: false", "async_chunk: true"))
    report = plan(qwen3, *QWEN3, *CARD)
    assert any("async_chunk: true has the stages work" in n for n in report["notes"])
    assert yaml.safe_load(report["overlay"])["async_chunk"] is False
    roomy = plan(qwen3, *QWEN3, "--device-memory", "141GiB")
    assert yaml.safe_load(roomy["overlay"])["async_chunk"] is True


def test_values_that_are_too_much_as_they_stand_are_said(qwen3: Path) -> None:
    qwen3.write_text(qwen3.read_text().replace("utilization: 0.05 ", "utilization: 0.9 "))
    (note,) = [n for n in plan(qwen3, *QWEN3, *CARD)["notes"] if "it would take" in n]
    assert "GPU 0: with what qwen3_omni.yaml says now (gpu_memory_utilization 0.9 thinker" in note


@pytest.mark.parametrize(
    ("name", "memory", "sizes"),
    [
        ("qwen2_5_omni", "48GiB", ("thinker=17GiB", "talker=3GiB", "code2wav=1.5GiB")),
        ("qwen3_omni", "80GiB", QWEN3),
        ("wan2_2", "24GiB", ("transformer=9.3GiB", "text_encoder=10.6GiB", "vae=1.4GiB")),
    ],
)
def test_the_overlays_values_fit_the_gpu_that_they_are_said_to_be_for(
    tmp_path: Path, name: str, memory: str, sizes: tuple[str, ...]
) -> None:
    overlay = yaml.safe_load((DEPLOY / f"swapd_{name}.yaml").read_text())
    eager = name != "qwen3_omni"  # as vllm-omni's own files have it
    stages = [{"stage_id": n, "enforce_eager": eager} for n in range(len(overlay["stages"]))]
    (tmp_path / overlay["base_config"]).write_text(yaml.safe_dump({"stages": stages}))
    path = tmp_path / f"swapd_{name}.yaml"
    path.write_text((DEPLOY / path.name).read_text())
    notes = plan(path, *sizes, "--device-memory", memory)["notes"]
    assert not [note for note in notes if "it would take" in note]
    assert f" {memory.removesuffix('GiB')}" in (DEPLOY / "README.md").read_text()


def test_several_gpus_have_a_daemon_each(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    a = {"stage_id": 0, "worker_cls": AR, "devices": "0,1", "tensor_parallel_size": 2}
    b = {"stage_id": 1, "worker_cls": AR, "devices": "1"}
    path.write_text(yaml.safe_dump({"async_chunk": False, "stages": [a, b]}))
    report = plan(path, "0=20GiB", "1=8GiB", "--device-memory", "40GiB")
    assert report["serve"] == [
        "swapd serve --device cuda:0 --budget 10GiB",
        "swapd serve --device cuda:1 --budget 18GiB",
    ]
    # one value for the stage: that of the GPU where it has least
    assert report["utilization"]["0"] < 0.4


def test_of_a_single_stage_the_components_take_turns(tmp_path: Path) -> None:
    (tmp_path / "wan2_2_ti2v.yaml").write_text("stages: [{stage_id: 0, enforce_eager: true}]")
    path = tmp_path / "mine.yaml"
    path.write_text((DEPLOY / "swapd_wan2_2.yaml").read_text())
    parts = ("transformer=9.3GiB", "text_encoder=10.6GiB", "vae=1.4GiB")
    shown = swapd("plan", "--vllm", path, *parts, "--device-memory", "24GiB").stdout
    assert "the components of wan take turns: 21.3 GiB of weights" in shown
    assert "moves 19.94 GiB" in shown  # the VAE stays
    assert "it would take" not in shown


def test_sizes_are_read_from_the_model(qwen3: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"thinker.visual.a": 3, "thinker.model.b": 5, "talker.c": 2, "code2wav.d": 1}
    save(model / "model.safetensors", **{name: n * MIB for name, n in sizes.items()})
    some = "{component: thinker, cpu_offload_enabled: true, cpu_offload_components: [visual]}"
    qwen3.write_text(qwen3.read_text().replace("{component: thinker}", some))
    report = plan(qwen3, model, *CARD)
    (gpu,) = report["gpus"]
    assert [s["weights_bytes"] // MIB for s in gpu["shares"]] == [8, 2, 1]
    assert not any("visual" in note for note in report["notes"])


def test_what_cannot_fit_is_refused_with_the_sum(qwen3: Path) -> None:
    said = refused(qwen3, *QWEN3, "--device-memory", "48GiB")
    assert "GPU 0 cannot hold these: 48 GiB - 2 GiB CUDA contexts of 4 processes" in said
    assert "thinker, the largest that takes turns (60 GiB) = 60 GiB must fit there at once" in said


def test_a_file_without_swapds_workers_is_told_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "shipped.yaml"
    path.write_text("stages: [{stage_id: 0}]")
    said = refused(path, "0=1GiB", *CARD)
    assert f"base_config: shipped.yaml) set worker_cls: {AR} for stage0" in said
    assert "for a stage of diffusion it is worker_extension_cls: swapd_client.vllm" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("thinker=60GiB", *CARD), "Say talker=SIZE, as in talker=17GiB"),
        ((*QWEN3, *CARD, "tinker=1GiB"), "no stage 'tinker'; did you mean thinker?"),
        ((*QWEN3, *CARD, "vae=1GiB"), "its stages are: thinker, talker, code2wav"),
        ((*QWEN3, *CARD, "--room", "talk=1GiB"), "has the stages thinker, talker, code2wav"),
        ((*QWEN3, *CARD, "--room", "talker"), "write it like talker=8GiB"),
        ((*QWEN3, *CARD, "--passes", "talker=2"), "--passes says nothing beside --vllm"),
        ((*QWEN3, *CARD, "thinker=1GiB"), "several components are called thinker"),
    ],
)
def test_what_makes_no_sense_is_named(qwen3: Path, words: tuple[str, ...], says: str) -> None:
    assert says in refused(qwen3, *words)


def test_its_options_alone_are_refused() -> None:
    said = swapd("plan", "dit=1GiB", "--room", "dit=1GiB", *CARD, status=1).stderr
    assert "--room and --overlay go with --vllm" in said
