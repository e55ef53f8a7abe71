"""Plans for models that do not fit: their layers stream, and the core finds room as planned."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from swapd.cli.plan_vllm import PlanOptions, StageFile, reports_of
from swapd.core.actions import Grant
from swapd.plan import deploy
from swapd.plan.shares import GpuPlan
from swapd.shared.protocol import Release
from swapd.shared.units import typed_size
from tests.core.world import World
from tests.plan import omni

GIB, MIB = 1 << 30, 1 << 20
AR = "swapd_client.vllm.omni.ARWorker"
GENERATION = "swapd_client.vllm.omni.GenerationWorker"


def decoder(hidden: int, inner: int, layers: int, heads: int, kv: int, words: int) -> Any:
    """A model's config.json, and the bytes of its tensors in bfloat16."""
    head = hidden // heads
    layer = 2 * (hidden * hidden * 2 + 2 * hidden * kv * head + 3 * hidden * inner)
    config = {
        "model_type": "olmo2",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": words,
        "max_position_embeddings": 4096,
    }
    sizes = {f"model.layers.{n}.w": layer for n in range(layers)}
    return config, {**sizes, "model.embed_tokens.weight": 4 * hidden * words}


#: OLMo-2-1124-7B, and the shapes of others of their size.
OLMO = decoder(4096, 11008, 32, 32, 32, 100352)
SHAPES = {
    "3B": decoder(3072, 8192, 28, 24, 8, 128256),
    "4B": decoder(2560, 9728, 36, 20, 8, 151936),
    "7B": OLMO,
    "12B": decoder(5120, 14336, 40, 32, 8, 131072),
}


def planned(
    folder: Path,
    model: tuple[Any, Any],
    card: str,
    *stages: dict[str, Any],
    chunk: str | None = None,
    bandwidth: float = 25e9,
) -> tuple[GpuPlan, dict[int, dict[str, Any]], tuple[str, ...]]:
    """The plan of one GPU, the stages of its overlay by number, and the notes."""
    path = folder / "deploy.yaml"
    path.write_text(yaml.safe_dump({"async_chunk": False, "stages": list(stages)}))
    file = StageFile(deploy.read(path), [str(omni.write(folder / "model", *model))])
    options = PlanOptions(typed_size(card), bandwidth=bandwidth, chunk=chunk)
    (report,) = reports_of([file], options).reports
    (gpu,) = report.gpus
    made = yaml.safe_load(report.overlay)
    return gpu, {one["stage_id"]: one for one in made["stages"]}, report.notes


def stage(number: int, name: str, worker: str = AR, **keys: Any) -> dict[str, Any]:
    swapd = {"component": name, **keys.pop("swapd", {})}
    steps = {"max_num_batched_tokens": 2048} if worker == AR else {}
    own = {"stage_id": number, "worker_cls": worker, "additional_config": {"swapd": swapd}}
    return {**own, **steps, **keys}


def of_omni(**thinker: Any) -> tuple[dict[str, Any], ...]:
    """Its other stages run without CUDA graphs."""
    eager: dict[str, Any] = {"enforce_eager": True}
    length = {key: n for key, n in thinker.items() if key == "max_model_len"}
    return (
        stage(0, "thinker", **thinker),
        stage(1, "talker", **eager, **length),
        stage(2, "code2wav", GENERATION, **eager),
    )


APART = {"cpu_offload_enabled": True, "cpu_offload_components": ["thinker", "visual"]}
MODELS = {
    "Qwen3-Omni on 48 GiB": ((omni.QWEN3, omni.QWEN3_BYTES), "48GiB", of_omni()),
    "Qwen3-Omni on 24 GiB": ((omni.QWEN3, omni.QWEN3_BYTES), "24GiB", of_omni()),
    "Qwen2.5-Omni-7B on 24 GiB": ((omni.QWEN2_5, omni.QWEN2_5_BYTES), "24GiB", of_omni()),
    "Qwen2.5-Omni-7B on 16 GiB": ((omni.QWEN2_5, omni.QWEN2_5_BYTES), "16GiB", of_omni()),
    "OLMo-2-7B on 16 GiB": (OLMO, "16GiB", (stage(0, "olmo", max_num_seqs=16),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_does_not_fit_streams_and_has_room(tmp_path: Path, name: str) -> None:
    model, card, stages = MODELS[name]
    gpu, settings, notes = planned(tmp_path, model, card, *stages)
    point = gpu.streams[0]
    assert point.what == "fastest"
    assert settings[0]["enforce_eager"] is True
    assert settings[0]["additional_config"]["swapd"]["resident"] == "auto"
    assert any("without CUDA graphs, because" in note for note in notes)
    assert gpu.budget_bytes <= gpu.total_bytes
    assert [one.streamed for one in gpu.streams] == sorted(one.streamed for one in gpu.streams)
    caches = [one.cache_bytes for one in gpu.streams]
    assert caches == sorted(caches), "the more layers stream, the more room for the cache"
    play(gpu)


def test_a_step_takes_as_long_as_its_copies_or_its_compute(tmp_path: Path) -> None:
    at = tmp_path / "slow"
    at.mkdir()
    slow, _, _ = planned(at, OLMO, "16GiB", stage(0, "olmo"))
    assert [p.step_s for p in slow.streams] == [p.step_bytes / 25e9 for p in slow.streams]
    fast, _, _ = planned(tmp_path, OLMO, "16GiB", stage(0, "olmo"), bandwidth=1e15)
    assert {round(p.step_s, 4) for p in fast.streams} == {0.0146}, "13.6 GiB at 1 TB/s"


def play(gpu: GpuPlan) -> None:
    """Two rounds of turns on a core with the plan's budget, in which each layer comes in."""
    chunk, point = gpu.chunk_bytes, gpu.streams[0]
    w = World(gpu.budget_bytes // chunk)
    sessions = {share.name: w.open() for share in gpu.shares}
    mine = sessions[point.name]
    layer = -(-(point.step_bytes // point.streamed) // chunk)
    w.register(mine, point.name, point.turn_bytes // chunk - point.slots * layer)
    passing = [f"{point.name}.{number}" for number in range(point.streamed)]
    for part in passing:
        w.register(mine, part, layer, policy="sequential")
    for share in gpu.shares:
        if share.name != point.name:
            w.register(sessions[share.name], share.name, -(-share.weights_bytes // chunk))
        if share.cache_bytes:
            w.register(sessions[share.name], f"{share.name}.kv", share.cache_bytes // chunk)
    for share in 2 * gpu.shares:
        session, cache = sessions[share.name], [f"{share.name}.kv"] * bool(share.cache_bytes)
        first = passing[: point.slots] if share.name == point.name else []
        whole = w.use(session, share.name, *cache, *first)
        if not first:
            w.release(whole)
            continue
        window = [w.use(session, part) for part in first]
        turn = w.use(session, share.name, *cache)
        w.release(whole)
        for part in [*passing[point.slots :], *first]:
            done = window.pop(0)
            window.append(w.acquire(session, part, early=True, spare=(Release(0, done[1]),)))
            assert isinstance(w.answers[window[-1]], Grant)
            w.settle()
        for key in (*window, turn):
            w.release(key)
        w.settle()


def test_on_12_gib_it_takes_shorter_requests_and_less_memory_beside(tmp_path: Path) -> None:
    thinker = {"max_model_len": 4096, "swapd": APART}
    model = (omni.QWEN2_5, omni.QWEN2_5_BYTES)
    path = tmp_path / "deploy.yaml"
    path.write_text(yaml.safe_dump({"async_chunk": False, "stages": [*of_omni(**thinker)]}))
    sources = [str(omni.write(tmp_path / "model", *model)), "thinker.visual=1.26GiB"]
    file = StageFile(deploy.read(path), sources, rooms=["code2wav=512MiB"])
    options = PlanOptions(12 << 30, overhead=3 << 30, bandwidth=25e9)
    (report,) = reports_of([file], options).reports
    (gpu,) = report.gpus
    assert gpu.streams[0].streamed == 28
    assert gpu.budget_bytes < 12 * GIB


@pytest.mark.parametrize(
    ("size", "streamed"),
    [("3B", 0), ("4B", 0), ("7B", 16), ("12B", 28)],
)
def test_models_of_each_size_on_16_gib(tmp_path: Path, size: str, streamed: int) -> None:
    """Small ones fit. Of the others as few layers stream as leave room for one request."""
    gpu, settings, _ = planned(
        tmp_path, SHAPES[size], "16GiB", stage(0, "model", max_model_len=4096, max_num_seqs=16)
    )
    assert sum(one.streamed for one in gpu.streams[:1]) == streamed
    assert ("resident" in settings[0]["additional_config"]["swapd"]) == bool(streamed)
