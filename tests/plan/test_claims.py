"""The claim of each stage on each GPU, from the deploy file and the sizes of its weights."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from swapd.plan import claims, deploy
from swapd.plan.advice import CHUNK_BYTES, ModelComponent, PlanError
from swapd.plan.demands import Demand
from swapd.plan.kv import USUAL_BYTES, UncountedCache, least_bytes, tokens_in
from swapd.plan.kv import workspace_of as of_decoder
from swapd.plan.shares import USUAL_CACHE
from tests.files import file_with
from tests.plan.omni import QWEN3

GIB = 1 << 30
AR = {"worker_cls": "swapd_client.vllm.omni.ARWorker"}
GENERATION = {"worker_cls": "swapd_client.vllm.omni.GenerationWorker"}
DIFFUSION = {"worker_extension_cls": "swapd_client.vllm.diffusion.DiffusionExtension"}


def stage(number: int, name: str = "", **keys: Any) -> dict[str, Any]:
    options = keys.pop("swapd", {}) | ({"component": name} if name else {})
    return {"stage_id": number, **keys, "additional_config": {"swapd": options}}


def claimed(
    folder: Path,
    *listed: dict[str, Any],
    rooms: dict[str, int] | None = None,
    config: dict[str, Any] | None = None,
    **sizes: float,
) -> tuple[dict[int, list[Demand]], list[str]]:
    path = file_with(folder / "d.yaml", yaml.safe_dump({"stages": list(listed)}))
    found = deploy.read(path)
    components = [
        ModelComponent(n.replace("__", "."), round(gib * GIB)) for n, gib in sizes.items()
    ]
    totals = dict.fromkeys((g for s in found.stages for g in s.gpus), 80 * GIB)
    return claims.of(claims.DeployFacts(found, components, rooms or {}, config), totals)


def alone(folder: Path, *listed: dict[str, Any], **sizes: Any) -> Demand:
    ((claim,),) = claimed(folder, *listed, **sizes)[0].values()
    return claim


def refused(folder: Path, *listed: dict[str, Any], **sizes: Any) -> str:
    with pytest.raises(PlanError) as caught:
        claimed(folder, *listed, **sizes)
    return str(caught.value)


def test_a_stage_is_found_by_name_number_or_other_name(tmp_path: Path) -> None:
    listed = stage(0, **AR), stage(1, "code2wav", **AR)
    sizes: dict[str, Any] = {"0": 3, "token2wav": 1}
    by_gpu, _ = claimed(tmp_path, *listed, **sizes)
    assert [c.weights for c in by_gpu[0]] == [3 * GIB, GIB]


def test_the_only_model_is_the_only_stages(tmp_path: Path) -> None:
    assert alone(tmp_path, stage(0, "a", **AR), Qwen3=6).weights == 6 * GIB


def test_what_is_not_named_stays(tmp_path: Path) -> None:
    some = {"cpu_offload_enabled": True, "cpu_offload_components": ["visual"]}
    claim = alone(tmp_path, stage(0, "a", swapd=some, **AR), a=6, a__visual=1)
    assert [(p.name, p.nbytes // GIB, p.stays) for p in claim.parts] == [
        ("a", 5, True),
        ("a.visual", 1, False),
    ]
    some["cpu_offload_components"] = ["a", "visual"]
    claim = alone(tmp_path, stage(0, "a", swapd=some, **AR), a=6, a__visual=1)
    assert [p.stays for p in claim.parts] == [False, False]


def test_a_part_of_unknown_size_is_said(tmp_path: Path) -> None:
    some = {"cpu_offload_enabled": True, "cpu_offload_components": ["visual"]}
    by_gpu, notes = claimed(tmp_path, stage(0, "a", swapd=some, **AR), a=6)
    assert by_gpu[0][0].weights == 6 * GIB
    assert any("give a.visual=SIZE" in note for note in notes)


def test_a_diffusion_stage_is_what_the_pipeline_has(tmp_path: Path) -> None:
    sizes = {"transformer": 20, "text_encoder": 9, "vae": 1}
    claim = alone(tmp_path, stage(0, "dit", **DIFFUSION), **sizes)
    assert [p.name for p in claim.parts] == list(sizes)
    assert not claim.at_once
    assert not claim.graphs
    model = {"enable_cpu_offload": True}
    claim = alone(tmp_path, stage(0, "dit", swapd=model, **DIFFUSION), **sizes)
    assert [p.stays for p in claim.parts] == [False, False, True]


def test_a_pipeline_that_is_divided_or_one_component_is_needed_whole(tmp_path: Path) -> None:
    sizes = {"transformer": 20, "vae": 2}
    two = stage(0, "dit", devices="0,1", tensor_parallel_size=2, **DIFFUSION)
    by_gpu, _ = claimed(tmp_path, two, transformer=20, vae=2)
    assert [(c.at_once, c.weights // GIB) for (c,) in by_gpu.values()] == [(True, 11)] * 2
    whole = {"cpu_offload_enabled": True, "cpu_offload_components": ["."]}
    claim = alone(tmp_path, stage(0, "dit", swapd=whole, **DIFFUSION), **sizes)
    assert (claim.at_once, [p.stays for p in claim.parts]) == (True, [False, False])


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 20),
        ({"enable_layerwise_offload": True}, 2 * 0.5 + 4),
        ({"cpu_offload_gb": 6}, 2 * 0.5 + 14),
        ({"cpu_offload_gb": 30}, 2 * 0.5 + 4),
    ],
)
def test_what_is_streamed_is_needed_in_part(
    tmp_path: Path, options: dict[str, Any], least: float
) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(yaml.safe_dump({"stages": [stage(0, "dit", swapd=options, **DIFFUSION)]}))
    dit = ModelComponent("transformer", 20 * GIB, 32, GIB // 2, 4 * GIB)
    by_gpu, _ = claims.of(
        claims.DeployFacts(deploy.read(path), [dit, ModelComponent("vae", GIB)]), {0: 80 * GIB}
    )
    ((claim,),) = by_gpu.values()
    assert [p.least / GIB for p in claim.parts] == [least, 1]


def test_without_a_configuration_caches_are_as_said_else_assumed_and_told(tmp_path: Path) -> None:
    said = stage(1, "b", kv_cache_memory_bytes=GIB, **AR)
    listed = stage(0, "a", **AR), said, stage(2, "code2wav", **GENERATION), stage(3, "c", **AR)
    by_gpu, notes = claimed(tmp_path, *listed, rooms={"c": 5 * GIB}, a=1, b=1, code2wav=1, c=1)
    assert [c.least_cache for c in by_gpu[0]] == [USUAL_CACHE, GIB, 0, 3 * GIB]
    own = [USUAL_BYTES["ar"], USUAL_BYTES["ar"], USUAL_BYTES["generation"], USUAL_BYTES["ar"]]
    assert [c.room for c in by_gpu[0]] == own
    assert [c.said for c in by_gpu[0]] == [False, True, True, True]
    (told,) = [n for n in notes if "taken to have a KV cache of 2 GiB" in n]
    assert told.startswith("a: ")


def test_a_cache_holds_one_request_of_the_length_that_the_stage_or_its_model_says(
    tmp_path: Path,
) -> None:
    listed = stage(0, "thinker", **AR), stage(1, "talker", max_model_len=4096, **AR)
    by_gpu, _ = claimed(tmp_path, *listed, config=QWEN3, thinker=60, talker=8)
    thinker, talker = by_gpu[0]
    assert thinker.cache is not None
    assert talker.cache is not None
    assert (thinker.cache.max_model_len, talker.cache.max_model_len) == (65536, 4096)
    assert thinker.least_cache == least_bytes(thinker.cache) == 6 * GIB + (16 * 96 << 10)
    assert tokens_in(talker.cache, talker.least_cache) == 4096
    assert thinker.room == of_decoder(QWEN3, "thinker", 32768)


def test_what_a_cache_takes_follows_the_stages_settings(tmp_path: Path) -> None:
    usual = alone(tmp_path, stage(0, "talker", **AR), config=QWEN3, talker=8)
    eight_bits = stage(0, "talker", kv_cache_dtype="fp8", **AR)
    heads = stage(0, "talker", devices="0,1", tensor_parallel_size=2, **AR)
    layers = stage(0, "talker", devices="0,1", pipeline_parallel_size=2, **AR)
    of_two = [
        next(iter(claimed(tmp_path, two, config=QWEN3, talker=8)[0].values()))[0]
        for two in (heads, layers)
    ]
    for found in (alone(tmp_path, eight_bits, config=QWEN3, talker=8), *of_two):
        assert found.least_cache * 2 == usual.least_cache
    larger = alone(tmp_path, stage(0, "talker", block_size=64, **AR), config=QWEN3, talker=8)
    assert larger.least_cache - usual.least_cache == (64 - 16) * (20 << 10)


def test_a_cache_holds_no_more_than_its_requests_at_once_without_prefixes(tmp_path: Path) -> None:
    four = {"max_num_seqs": 4, **AR}
    for prefixes, requests in ((False, 4), (True, None), (None, None)):
        keys = four if prefixes is None else {**four, "enable_prefix_caching": prefixes}
        claim = alone(tmp_path, stage(0, "talker", **keys), config=QWEN3, talker=8)
        assert claim.cache is not None
        assert claim.most_cache == (requests and least_bytes(claim.cache, requests))
    unknown = stage(0, "talker", enable_prefix_caching=False, **AR)
    assert alone(tmp_path, unknown, config=QWEN3, talker=8).most_cache is None


def test_a_room_that_holds_no_request_is_refused_and_says_which_would(tmp_path: Path) -> None:
    rooms = {"thinker": of_decoder(QWEN3, "thinker", 8192) + 3 * GIB}
    listed = stage(0, "thinker", max_num_batched_tokens=8192, **AR)
    said = refused(tmp_path, listed, config=QWEN3, rooms=rooms, thinker=60)
    assert "the workspace of thinker alone takes 1.609 GiB, and a KV cache for one request" in said
    assert "of its max_model_len, 65536 tokens of 96 KiB, takes 6.062 GiB" in said
    assert "or set max_model_len: 32752 or less" in said
    enough = int(said.partition("Give --room thinker=")[2].partition("MiB")[0]) << 20
    larger = alone(tmp_path, listed, config=QWEN3, rooms={"thinker": enough}, thinker=60)
    assert larger.least_cache == 97 * CHUNK_BYTES
    less = {"thinker": enough - (1 << 20)}
    assert "too small" in refused(tmp_path, listed, config=QWEN3, rooms=less, thinker=60)
    shorter = {**listed, "max_model_len": 32752}
    claim = alone(tmp_path, shorter, config=QWEN3, rooms=rooms, thinker=60)
    assert (claim.least_cache, claim.said) == (3 * GIB, True)
    nothing = refused(tmp_path, listed, config=QWEN3, rooms={"thinker": GIB}, thinker=60)
    assert "the workspace of thinker alone takes" in nothing


def test_a_cache_that_is_not_counted_must_be_said(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4, "mamba_num_heads": 8, "hidden_size": 64}
    with pytest.raises(UncountedCache, match="state-space or linear-attention"):
        claimed(tmp_path, stage(0, "a", **AR), config=config, a=1)
    said = stage(0, "a", kv_cache_memory_bytes=GIB, **AR)
    assert alone(tmp_path, said, config=config, a=1).least_cache == GIB


def test_sliding_windows_are_named(tmp_path: Path) -> None:
    decoder = QWEN3["thinker_config"]["text_config"]
    _, notes = claimed(tmp_path, stage(0, "a", **AR), config={**decoder, "sliding_window": 64}, a=1)
    assert any("a: its model has layers with a sliding window" in note for note in notes)
    _, notes = claimed(tmp_path, stage(0, "a", **AR), config=decoder, a=1)
    assert not any("sliding window" in note for note in notes)


def test_what_a_draft_model_remembers_is_said_not_to_be_counted(tmp_path: Path) -> None:
    drafts = stage(0, "thinker", speculative_config={"method": "eagle"}, **AR)
    _, notes = claimed(tmp_path, drafts, config=QWEN3, thinker=60)
    assert any("the cache of its draft model is not counted" in note for note in notes)


def test_what_has_not_swapds_worker_takes_what_it_says(tmp_path: Path) -> None:
    listed = stage(0, "a", **AR), stage(1, "asr", gpu_memory_utilization=0.1)
    by_gpu, _ = claimed(tmp_path, *listed, a=1)
    assert by_gpu[0][1].room == 8 * GIB
    unsaid = stage(0, "a", **AR), stage(1, "asr")
    assert "give --room asr=SIZE" in refused(tmp_path, *unsaid, a=1)


def test_a_pipeline_without_swapd_takes_its_weights_and_activations(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(yaml.safe_dump({"stages": [stage(0, "a", **AR), stage(1, "dit")]}))
    found = deploy.read(path)
    pipeline = msgspec.structs.replace(found.stages[1], kind="diffusion")
    found = msgspec.structs.replace(found, stages=(found.stages[0], pipeline))
    sizes = [
        ModelComponent("a", GIB),
        ModelComponent("transformer", 20 * GIB),
        ModelComponent("vae", GIB),
    ]
    by_gpu, _ = claims.of(claims.DeployFacts(found, sizes), {0: 80 * GIB})
    assert by_gpu[0][1].room == 21 * GIB + USUAL_BYTES["diffusion"]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({}, "the size of stage 0's weights (thinker) is unknown. Give thinker=SIZE"),
        ({"talker": 1}, "Known so far: talker"),
        ({"thinker": 1, "thinker__visual": 2, "talker": 1}, "smaller than its parts"),
    ],
)
def test_sizes_that_are_missing_or_make_no_sense_are_named(
    tmp_path: Path, sizes: dict[str, float], says: str
) -> None:
    some = {"cpu_offload_enabled": True, "cpu_offload_components": ["visual"]}
    listed = stage(0, "thinker", swapd=some, **AR), stage(1, "talker", **AR)
    assert says in refused(tmp_path, *listed, **sizes)


def test_each_block_has_chunks_of_its_own(tmp_path: Path) -> None:
    """Each block takes twice its size in chunks if it is slightly larger than a chunk."""
    path = tmp_path / "d.yaml"
    by_layer = stage(0, "dit", swapd={"enable_layerwise_offload": True}, **DIFFUSION)
    path.write_text(yaml.safe_dump({"stages": [by_layer]}))
    dit = ModelComponent("transformer", 65 * 40 << 20, 40, 65 << 20)
    ((claim,),) = claims.of(claims.DeployFacts(deploy.read(path), [dit]), {0: 80 * GIB})[0].values()
    (part,) = claim.parts
    assert (part.taken, part.least) == (128 * 40 << 20, 128 * 2 << 20)


def test_what_is_not_to_be_offloaded_stays(tmp_path: Path) -> None:
    off = {"cpu_offload_enabled": False}
    assert [p.stays for p in alone(tmp_path, stage(0, "a", swapd=off, **AR), a=6).parts] == [True]
