"""`swapd plan --vllm`, as its users run it."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from swapd.cli.plan_page import VllmPlanReport
from swapd.cli.plan_vllm import PlanOptions, StageFile, reports_of
from swapd.plan import deploy
from swapd.shared.units import seconds, size, typed_size
from tests.files import file_with
from tests.plan import omni

from .conftest import MIB, swapd

DEPLOY = Path(__file__).parents[2] / "deploy" / "vllm-omni"
GIB = 1 << 30
CARD = ("--device-memory", "80GiB", "--bandwidth", "25GB/s")
QWEN3 = ("thinker=60GiB", "talker=8.5GiB", "code2wav=0.41GiB")
AR = "swapd_client.vllm.omni.ARWorker"


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    """The overlay beside a base file like the one that it names."""
    said = {"gpu_memory_utilization": 0.9, "max_num_seqs": 64, "enable_prefix_caching": False}
    stages = [{"stage_id": n, "devices": str(n), **said} for n in range(3)]
    base = {"async_chunk": True, "stages": stages}
    (tmp_path / "qwen3_omni_moe.yaml").write_text(yaml.safe_dump(base))
    return file_with(tmp_path / "qwen3_omni.yaml", (DEPLOY / "swapd_qwen3_omni.yaml").read_text())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as large as Qwen3-Omni's, without the weights."""
    return omni.qwen3(tmp_path / "Qwen3-Omni")


def plan(*words: object) -> Any:
    return json.loads(swapd("plan", "--vllm", *words, "--json").stdout)


def remedies(report: Any) -> str:
    """What would let the stages keep their CUDA graphs."""
    (note,) = [n for n in report["notes"] if "without CUDA graphs, because" in n]
    return str(note).partition("It takes ")[2]


def refused(*words: object) -> str:
    return swapd("plan", "--vllm", *words, status=1).stderr


def test_qwen3_omni_on_80_gib_has_caches_of_one_request_and_more_as_far_as_that_moves_nothing(
    qwen3: Path, model: Path
) -> None:
    report = plan(qwen3, model, *CARD)
    (gpu,) = report["gpus"]
    assert report["serve"] == ["swapd serve --device cuda:0 --budget 68672MiB --chunk 64MiB"]
    assert [s["takes_turns"] for s in gpu["shares"]] == [True, True, True]
    shares = {s["name"]: s for s in gpu["shares"]}
    for name in ("thinker", "talker"):
        share = shares[name]
        assert share["max_model_len"] == 65536  # the limit of the model
        assert share["cache_tokens"] >= 65536
    assert shares["code2wav"]["cache_bytes"] == 0  # it has no KV cache
    beside = sum(t["nbytes"] for t in gpu["beside"]) + sum(s["room_bytes"] for s in gpu["shares"])
    assert gpu["stays_bytes"] == beside
    assert gpu["stays_bytes"] + gpu["turn_bytes"] <= 80 * GIB
    assert gpu["turn_bytes"] <= gpu["budget_bytes"]
    assert (gpu["largest"], gpu["turn_cache_bytes"]) == (
        "thinker",
        shares["thinker"]["cache_bytes"],
    )


def test_chunks_are_counted_with_and_said_to_the_daemon(qwen3: Path, model: Path) -> None:
    by_64, by_256 = (plan(qwen3, model, *CARD, "--chunk", f"{n}MiB") for n in (64, 256))
    for report, chunk in (by_64, 64 * MIB), (by_256, 256 * MIB):
        (gpu,) = report["gpus"]
        assert report["chunk_bytes"] == gpu["chunk_bytes"] == chunk
        assert report["serve"][0].endswith(f" --chunk {chunk // MIB}MiB")
        assert not gpu["budget_bytes"] % chunk
        needed = sum(s["weights_bytes"] + s["cache_bytes"] for s in gpu["shares"])
        # each stage loads whole parts: as many layers as fill 16 chunks
        parts = 2 * (16 * chunk + 1246241280)
        assert gpu["moved_bytes"] <= 2 * (needed - gpu["budget_bytes"]) + parts
        shares = {s["name"]: s for s in gpu["shares"]}
        for share in (shares["thinker"], shares["talker"]):
            assert not share["cache_bytes"] % chunk
            assert share["cache_tokens"] >= share["max_model_len"] == 65536
    moved = by_64["gpus"][0]["moved_bytes"], by_256["gpus"][0]["moved_bytes"]
    assert moved[0] < moved[1], "what leaves is a part, of as many chunks"


def test_under_strict_isolation_the_chunks_are_those_of_the_shorter_round(
    qwen3: Path, model: Path
) -> None:
    strict = plan(qwen3, model, *CARD, "--isolation", "strict")
    assert strict["serve"][0].endswith(" --chunk 64MiB --isolation strict")
    assert strict["chunk_from"].startswith("in chunks of 256 MiB a round would move 11.24 GiB")
    assert strict["gpus"] == plan(qwen3, model, *CARD)["gpus"]
    fast = (*CARD[:2], "--bandwidth", "1500GB/s", "--isolation", "strict")
    strict = plan(qwen3, model, *fast)
    assert strict["serve"][0].endswith(" --chunk 256MiB --isolation strict")
    assert strict["chunk_from"].startswith("a round takes ")
    assert "multiple of 2 MiB" in refused(qwen3, model, *CARD, "--chunk", "3000000")


def report_of(path: Path, model: Path, options: PlanOptions) -> VllmPlanReport:
    """The plan of one deploy file, in this process."""
    (report,) = reports_of([StageFile(deploy.read(path), [str(model)])], options).reports
    return report


def test_where_large_chunks_do_not_fit_small_ones_are_taken(qwen3: Path, model: Path) -> None:
    """Each of the thinker's parts takes whole chunks."""
    card = PlanOptions(typed_size("79.5GiB"), bandwidth=25e9)
    planned = partial(report_of, qwen3, model)
    for options in card._replace(isolation="strict"), card._replace(chunk="auto"):
        report = planned(options)
        assert report.chunk_from == "in chunks of 256 MiB it would not fit"
        assert " --chunk 64MiB" in report.serve[0]
    report = planned(card._replace(chunk="256MiB"))
    (note,) = [n for n in report.notes if n.startswith("thinker: without CUDA graphs, because")]
    assert "must fit there at once" in note


def test_people_are_told_the_sum_the_turns_and_what_to_paste(qwen3: Path, model: Path) -> None:
    shown = " ".join(swapd("plan", "--vllm", qwen3, model, *CARD).stdout.split())
    assert "GPU 0: 80 GiB - 2 GiB CUDA contexts of 4 processes - 4 GiB CUDA graphs of" in shown
    assert "leaves 67.06 GiB for weights and KV caches, counted once" in shown
    assert "thinker 59.08 GiB 6.375 GiB 69616 1.609 GiB" in shown
    assert "stays: 12.91 GiB. The largest turn is that of thinker: 66.75 GiB" in shown
    assert "thinker, talker, code2wav take turns: 65.68 GiB of weights" in shown
    assert "moves 7.457 GiB and waits 320 ms for it; if stages left as wholes, 65.68 GiB" in shown
    assert (
        "with 6.688 GiB for thinker and 8 GiB for talker a round moves 14.72 GiB and waits 632 ms "
        "(--room thinker=8496MiB --room talker=9520MiB)"
    ) in shown
    assert "host memory for copies of weights and KV caches: 73.68 GiB" in shown
    assert "swapd serve --device cuda:0 --budget 68672MiB --chunk 64MiB" in shown
    assert "max_model_len: 65536" in shown


def test_the_page_shows_what_is_printed(qwen3: Path, model: Path) -> None:
    page = (DEPLOY / "README.md").read_text()
    shown = page.partition("--device-memory 80GiB\n")[2].partition("\n...\n")[0].split()
    printed = swapd("plan", "--vllm", qwen3, model, *CARD).stdout.split()
    assert len(shown) > 50
    assert shown == printed[: len(shown)]
    said = remedies(plan(qwen3, model, "--device-memory", "79GiB"))
    assert f"79 GiB it says `{said.partition(',')[0]}`" in " ".join(page.split())


def test_a_request_that_does_not_fit_is_refused_with_a_length_that_does(
    qwen3: Path, model: Path
) -> None:
    qwen3.write_text(qwen3.read_text().replace("max_num_batched_tokens: 8192", ""))
    (said,) = [n for n in plan(qwen3, model, *CARD)["notes"] if "without CUDA graphs" in n]
    assert "6.062 GiB KV cache for one request of 65536 tokens, its max_model_len" in said
    longest = said.partition("It takes max_model_len: ")[2].split()[0]
    qwen3.write_text(qwen3.read_text().replace("len: 65536", f"len: {longest}", 1))
    (gpu,) = plan(qwen3, model, *CARD)["gpus"]
    assert gpu["shares"][0]["cache_tokens"] == gpu["shares"][0]["max_model_len"] == int(longest)
    more = int(longest) + 16 * 100
    qwen3.write_text(qwen3.read_text().replace(f"len: {longest}", f"len: {more}", 1))
    assert f"max_model_len: {longest} or less" in remedies(plan(qwen3, model, *CARD))


def test_the_configuration_can_be_named_where_sizes_are_given(qwen3: Path, model: Path) -> None:
    assert "the model's config.json (--config FILE), from which" in refused(qwen3, *QWEN3, *CARD)
    qwen3.write_text(re.sub(r"kv_cache_memory_bytes: \d+", "", qwen3.read_text()))
    (without,) = plan(qwen3, *QWEN3, *CARD)["gpus"]
    (given,) = plan(qwen3, *QWEN3, *CARD, "--config", model / "config.json")["gpus"]
    assert [s["cache_tokens"] > 0 for s in without["shares"]] == [False, False, False]
    assert [s["cache_tokens"] > 65536 for s in given["shares"]] == [True, True, False]
    assert without["moved_bytes"] == without["moved_whole_bytes"]  # its layers are unknown
    assert given["moved_bytes"] < given["moved_whole_bytes"] / 3


def test_what_fits_has_its_kv_caches_grow(qwen3: Path, model: Path) -> None:
    report = plan(qwen3, model, "--device-memory", "141GiB", "--room", "talker=6GiB")
    (gpu,) = report["gpus"]
    shares = {s["name"]: s for s in gpu["shares"]}
    assert gpu["moved_bytes"] == 0
    talker = shares["talker"]["cache_bytes"] + shares["talker"]["room_bytes"]
    assert 0 <= 6 * GIB - talker < 64 * MIB
    assert shares["thinker"]["cache_bytes"] > 50 * GIB
    shown = swapd("plan", "--vllm", qwen3, model, "--device-memory", "141GiB").stdout
    assert "fit: no copies, and no waits" in shown


def test_the_deploy_file_alone_can_be_kept(qwen3: Path, model: Path, tmp_path: Path) -> None:
    made = tmp_path / "elsewhere" / "made.yaml"
    made.parent.mkdir()
    qwen3.write_text(qwen3.read_text().replace(", kv: auto", ""))
    made.write_text(swapd("plan", "--vllm", qwen3, model, *CARD, "--overlay").stdout)
    own = yaml.safe_load(made.read_text())
    assert own["base_config"] == str((tmp_path / "qwen3_omni_moe.yaml").resolve())
    assert own["async_chunk"] is True, "as in the file that it is based on"
    assert [s["gpu_memory_utilization"] for s in own["stages"]] == [0.02, 0.016, 0.025]
    caches = [s.get("kv_cache_memory_bytes") for s in own["stages"]]
    assert caches == [102 * 64 * MIB, 26 * 64 * MIB, None]
    assert [s.get("max_model_len") for s in own["stages"]] == [65536, 65536, None]
    assert own["stages"][0]["worker_cls"] == AR
    said = [s["additional_config"]["swapd"] for s in own["stages"]]
    assert [one.get("kv") for one in said] == ["auto", "auto", None], "its cache is in the arena"
    assert [one["component"] for one in said] == ["thinker", "talker", "code2wav"]
    again = plan(made, model, *CARD)
    assert again["settings"] == plan(qwen3, model, *CARD)["settings"]


def test_a_cache_of_another_size_in_the_file_is_said_and_can_be_kept(
    qwen3: Path, model: Path
) -> None:
    qwen3.write_text(qwen3.read_text().replace("1744830464", "4294967296"))
    (note,) = [n for n in plan(qwen3, model, *CARD)["notes"] if "would keep it" in n]
    assert "talker: qwen3_omni.yaml has a KV cache of 4 GiB" in note
    room = note.partition("--room ")[2].split()[0]
    (gpu,) = plan(qwen3, model, *CARD, "--room", room)["gpus"]
    assert gpu["shares"][1]["cache_bytes"] == 4 * GIB


def test_stages_that_stream_go_on_to_and_are_told_which_change_places(
    qwen3: Path, model: Path
) -> None:
    report = plan(qwen3, model, *CARD)
    (note,) = [n for n in report["notes"] if n.startswith("async_chunk: true has the stages work")]
    assert "thinker, talker, code2wav change places" in note
    assert yaml.safe_load(report["overlay"])["async_chunk"] is True
    less = plan(qwen3, model, *CARD, "--room", "thinker=7.8GiB")
    (note,) = [n for n in less["notes"] if n.startswith("async_chunk: true has the stages work")]
    assert "thinker, talker change places" in note
    assert "and code2wav fits beside them and stays" in note
    qwen3.write_text(f"async_chunk: false\n{qwen3.read_text()}")
    report = plan(qwen3, model, *CARD)
    assert yaml.safe_load(report["overlay"])["async_chunk"] is False
    assert not any("async_chunk" in n for n in report["notes"])


def test_values_that_are_too_much_as_they_stand_are_said(qwen3: Path, model: Path) -> None:
    text = qwen3.read_text().replace("utilization: 0.02 ", "utilization: 0.9 ")
    qwen3.write_text(text.replace("    kv_cache_memory_bytes: 6845104128\n", ""))
    (note,) = [n for n in plan(qwen3, *QWEN3, *CARD)["notes"] if "it would take" in n]
    assert "settings in qwen3_omni.yaml now (gpu_memory_utilization 0.9 of thinker" in note
    private = re.sub(r", kv: auto", "", text).replace("1744830464", "17448304640")
    qwen3.write_text(private)
    (note,) = [n for n in plan(qwen3, model, *CARD)["notes"] if "it would take" in n]
    assert "+ a KV cache of 16.25 GiB for talker" in note


def beside_its_base(folder: Path, name: str) -> Path:
    """One of the overlays, beside a base file with the memory settings of vllm-omni's own."""
    overlay = yaml.safe_load((DEPLOY / f"swapd_{name}.yaml").read_text())
    is_qwen3 = name.startswith("qwen3_omni")
    said = {
        "enforce_eager": not is_qwen3,
        "enable_prefix_caching": False,
        "max_num_seqs": 64 if is_qwen3 else 1,
    }
    stages = [{"stage_id": n, **said} for n in range(len(overlay["stages"]))]
    base = {"async_chunk": is_qwen3, "stages": stages}
    (folder / overlay["base_config"]).write_text(yaml.safe_dump(base))
    file = f"swapd_{name}.yaml"
    return file_with(folder / file, (DEPLOY / file).read_text())


#: The models of the overlays and of the page's table: a deploy file, a config.json, and sizes.
MODELS = {
    "Qwen2.5-Omni-3B": ("qwen2_5_omni", omni.QWEN2_5_3B, omni.QWEN2_5_3B_BYTES),
    "Qwen2.5-Omni-7B": ("qwen2_5_omni", omni.QWEN2_5, omni.QWEN2_5_BYTES),
    "Qwen3-Omni-30B-A3B": ("qwen3_omni", omni.QWEN3, omni.QWEN3_BYTES),
}
WAN = ("transformer=9.3GiB", "text_encoder=10.6GiB", "vae=1.4GiB")


@pytest.mark.parametrize(
    ("name", "memory", "which"),
    [
        ("qwen3_omni_48gib", "48GiB", "Qwen3-Omni-30B-A3B"),
        ("qwen2_5_omni", "48GiB", "Qwen2.5-Omni-7B"),
        ("qwen3_omni", "80GiB", "Qwen3-Omni-30B-A3B"),
        ("wan2_2", "24GiB", None),
    ],
)
def test_the_overlays_values_are_those_of_the_gpu_that_they_are_said_to_be_for(
    tmp_path: Path, name: str, memory: str, which: str | None
) -> None:
    path = beside_its_base(tmp_path, name)
    sizes = (omni.write(tmp_path / "model", *MODELS[which][1:]),) if which else WAN
    report = plan(path, *sizes, "--device-memory", memory)
    assert not [n for n in report["notes"] if "it would take" in n or "would keep it" in n]
    for stage in yaml.safe_load(path.read_text())["stages"]:
        settings = report["settings"][str(stage["stage_id"])]
        if name != "wan2_2":  # which fits with room to spare
            assert {key: stage[key] for key in settings} == settings
    assert f" {memory.removesuffix('GiB')}" in (DEPLOY / "README.md").read_text()


def test_the_page_says_what_a_round_of_each_overlay_moves_on_each_gpu(tmp_path: Path) -> None:
    page = (DEPLOY / "README.md").read_text()
    heading, _, *rows = page[page.index("| model | 24 GiB |") :].partition("\n\n")[0].splitlines()
    cards = [cell.strip().replace(" ", "") for cell in heading.strip("| ").split("|")][1:]
    said = {cells[0]: cells[1:] for row in rows if (cells := row.strip("| ").split(" | "))}
    assert cards == ["24GiB", "40GiB", "48GiB", "80GiB"]
    assert said.keys() == MODELS.keys()
    for model, (name, config, sizes) in MODELS.items():
        path = beside_its_base(tmp_path, name)
        folder = omni.write(tmp_path / model, config, sizes)
        for card, cell in zip(cards, said[model], strict=True):
            (gpu,) = report_of(path, folder, PlanOptions(typed_size(card))).gpus
            fits = "" if gpu.takes_turns else ", all fits"
            if gpu.streams:
                one = gpu.streams[0]
                fits = f", and {size(one.step_bytes)} a step: {one.streamed} of {one.layers} layers"
            assert cell == f"{size(gpu.moved_bytes)}, {seconds(gpu.request_s)}{fits}".replace(
                ", 0 us", ""
            ), (model, card)


def test_a_round_of_qwen2_5_omni_moves_nothing_where_one_request_each_fits(tmp_path: Path) -> None:
    """The base file has max_num_seqs: 1 and no prefixes, so a larger cache would be of no use."""
    path = beside_its_base(tmp_path, "qwen2_5_omni")
    folder = omni.write(tmp_path / "model", omni.QWEN2_5, omni.QWEN2_5_BYTES)
    (gpu,) = report_of(path, folder, PlanOptions(40 << 30)).gpus
    assert [s.cache_tokens for s in gpu.shares] == [33920, 34112, 0]
    assert (gpu.moved_bytes, gpu.larger) == (0, None)


def test_a_stage_is_counted_with_the_tensors_of_others_that_it_keeps_and_in_its_own_type(
    tmp_path: Path,
) -> None:
    """Qwen2.5-Omni's talker keeps the thinker's embedding; token2wav is loaded in 16 bits."""
    path = beside_its_base(tmp_path, "qwen2_5_omni")
    folder = omni.write(tmp_path / "model", omni.QWEN2_5, omni.QWEN2_5_BYTES)
    thinker, talker, code2wav = plan(path, folder, "--device-memory", "48GiB")["gpus"][0]["shares"]
    own = {
        name: sum(n for k, n in omni.QWEN2_5_BYTES.items() if k.startswith(name))
        for name in ("thinker", "talker", "token2wav")
    }
    assert thinker["weights_bytes"] == own["thinker"]
    embedding = omni.QWEN2_5_BYTES["thinker.model.embed_tokens.weight"]
    assert talker["weights_bytes"] == own["talker"] + embedding
    assert code2wav["weights_bytes"] == own["token2wav"] // 2
    path.write_text(
        path.read_text().replace(
            "component: code2wav}}", "component: code2wav}}\n    dtype: float32"
        )
    )
    *_, code2wav = plan(path, folder, "--device-memory", "48GiB")["gpus"][0]["shares"]
    assert code2wav["weights_bytes"] == own["token2wav"]


def test_a_size_behind_an_option_for_another_stage_is_told_from_a_second_component(
    qwen3: Path, model: Path
) -> None:
    said = refused(qwen3, model, *CARD, "--room", "thinker=8GiB", "talker=3GiB")
    assert (
        "several components are called talker: talker=3GiB is one more size of its weights" in said
    )
    assert "write the option before each of its values, as in --room talker=3GiB" in said


def test_several_gpus_have_a_daemon_each(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    a = {"stage_id": 0, "worker_cls": AR, "devices": "0,1", "tensor_parallel_size": 2}
    b = {"stage_id": 1, "worker_cls": AR, "devices": "1"}
    path.write_text(yaml.safe_dump({"async_chunk": False, "stages": [a, b]}))
    report = plan(path, "0=20GiB", "1=8GiB", "--device-memory", "40GiB")
    assert report["serve"] == [
        "swapd serve --device cuda:0 --budget 16000MiB --chunk 64MiB",
        "swapd serve --device cuda:1 --budget 29184MiB --chunk 64MiB",
    ]
    # one value for the stage, on both GPUs
    caches = [
        s["cache_bytes"] for gpu in report["gpus"] for s in gpu["shares"] if not s["stage_id"]
    ]
    assert caches == [report["settings"]["0"]["kv_cache_memory_bytes"]] * 2


def test_of_a_single_stage_the_components_take_turns(tmp_path: Path) -> None:
    (tmp_path / "wan2_2_ti2v.yaml").write_text("stages: [{stage_id: 0, enforce_eager: true}]")
    path = file_with(tmp_path / "mine.yaml", (DEPLOY / "swapd_wan2_2.yaml").read_text())
    parts = ("transformer=9.3GiB", "text_encoder=10.6GiB", "vae=1.4GiB")
    shown = swapd("plan", "--vllm", path, *parts, "--device-memory", "24GiB").stdout
    assert "the components of wan take turns: 21.3 GiB of weights" in shown
    assert "moves 19.9 GiB" in shown  # the VAE stays
    assert "it would take" not in shown


def test_what_cannot_fit_is_refused_with_the_sum(qwen3: Path) -> None:
    said = refused(qwen3, *QWEN3, "--device-memory", "48GiB")
    assert "GPU 0 cannot hold these: 48 GiB - 2 GiB CUDA contexts of 4 processes" in said
    assert "thinker, the largest that takes turns (60 GiB of weights + 6.375 GiB KV cache)" in said
    assert "= 66.38 GiB must fit there at once" in said


def test_a_file_without_swapds_workers_is_told_the_lines(tmp_path: Path) -> None:
    path = file_with(tmp_path / "shipped.yaml", "stages: [{stage_id: 0}]")
    said = refused(path, "0=1GiB", *CARD)
    assert f"base_config: shipped.yaml) set worker_cls: {AR} for stage0" in said
    assert "for a stage of diffusion it is worker_extension_cls: swapd_client.vllm" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("thinker=60GiB", *CARD), "Give talker=SIZE, as in talker=17GiB"),
        ((*QWEN3, *CARD, "tinker=1GiB"), "no stage 'tinker'; did you mean thinker?"),
        ((*QWEN3, *CARD, "vae=1GiB"), "its stages are: thinker, talker, code2wav"),
        ((*QWEN3, *CARD, "--room", "talk=1GiB"), "nothing is called 'talk'; did you mean talker?"),
        ((*QWEN3, *CARD, "--room", "talker"), "write it like talker=8GiB"),
        ((*QWEN3, *CARD, "--passes", "talker=2"), "--passes has no effect with --vllm"),
        ((*QWEN3, *CARD, "thinker=1GiB"), "several components are called thinker"),
    ],
)
def test_what_makes_no_sense_is_named(qwen3: Path, words: tuple[str, ...], says: str) -> None:
    assert says in refused(qwen3, *words)


def test_its_options_alone_are_refused() -> None:
    said = swapd("plan", "dit=1GiB", "--room", "dit=1GiB", *CARD, status=1).stderr
    assert "--room, --config and --overlay go with --vllm" in said
