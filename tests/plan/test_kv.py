"""Sizes of KV caches by configuration; a plan refuses a configuration that it cannot count.

tests/vllm/test_kv_cache.py compares the sizes with vLLM's own.
"""

from typing import Any

import pytest

from swapd.plan import kv
from swapd.plan.kv import KvCache, KvLayout, UncountedCache
from tests.plan.omni import QWEN3

GIB, KIB = 1 << 30, 1 << 10
PLAIN: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "hidden_size": 512,
    "max_position_embeddings": 512,
}


def cache(layout: KvLayout, *, tokens: int = 512, shards: int = 1, block: int = 16) -> KvCache:
    return kv.cache_of(
        layout, max_model_len=tokens, block_tokens=block, item_bytes=2, shards=shards
    )


def of(**more: Any) -> KvLayout:
    return kv.layout_of({**PLAIN, **more}, "model")


def refused(**more: Any) -> str:
    with pytest.raises(UncountedCache) as caught:
        of(**more)
    return str(caught.value)


def test_heads_are_divided_until_each_process_has_one() -> None:
    layout = of(num_key_value_heads=4)
    bytes_of = [kv.token_bytes(cache(layout, shards=n)) for n in (1, 2, 4, 8)]
    assert bytes_of == [6 * 4 * 128 * 2, 6 * 2 * 128 * 2, 6 * 128 * 2, 6 * 128 * 2]


def test_of_a_latent_each_process_has_all() -> None:
    layout = of(
        model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64, num_key_value_heads=8
    )
    assert [kv.token_bytes(cache(layout, shards=n)) for n in (1, 8)] == [6 * 576 * 2] * 2


def test_what_a_cache_holds_and_what_holds_it_agree() -> None:
    layout = of()
    for tokens in (1, 15, 16, 17, 500):
        least = kv.least_bytes(cache(layout, tokens=tokens))
        assert kv.tokens_in(cache(layout, tokens=tokens), least) >= tokens
        assert kv.tokens_in(cache(layout, tokens=tokens), least - 1) < tokens
    assert kv.tokens_in(cache(layout), 0) == 0


def test_windows_are_counted_as_if_there_were_none() -> None:
    window = {"sliding_window": 64}
    assert kv.least_bytes(cache(of(**window))) > kv.least_bytes(cache(of()))
    mixed = of(**window, layer_types=["full_attention"] * 2 + ["sliding_attention"] * 4)
    assert (mixed.windows, mixed.allocated) == (True, 6)


@pytest.mark.parametrize(
    ("full", "sliding", "allocated"), [(1, 5, 6), (2, 5, 8), (12, 13, 26), (4, 4, 8), (0, 3, 3)]
)
def test_groups_of_layers_are_filled_up_as_vllm_does_it(
    full: int, sliding: int, allocated: int
) -> None:
    kinds = ["full_attention"] * full + ["sliding_attention"] * sliding
    assert of(layer_types=kinds, num_hidden_layers=full + sliding).allocated == allocated


@pytest.mark.parametrize(
    ("said", "longest"),
    [
        ({}, 512),
        ({"max_position_embeddings": None}, None),
        ({"max_sequence_length": 256}, 256),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 2048),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 512),
    ],
)
def test_the_longest_request_is_what_the_model_is_made_for(
    said: dict[str, Any], longest: int | None
) -> None:
    assert of(**said).longest == longest


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "nbytes"),
    [(None, None, 2), ("auto", "auto", 2), ("float32", "auto", 4), ("bfloat16", "fp8_e4m3", 1)],
)
def test_numbers_are_as_large_as_the_stage_says(
    dtype: str | None, kv_cache_dtype: str | None, nbytes: int
) -> None:
    assert kv.item_bytes(dtype, kv_cache_dtype) == nbytes


def test_a_type_of_unknown_size_is_refused() -> None:
    with pytest.raises(UncountedCache, match="nvfp4 is unknown; set kv_cache_memory_bytes"):
        kv.item_bytes(None, "nvfp4")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": ["chunked_attention"] * 6}, "chunked_attention"),
        ({"mamba_d_state": 16}, "state-space or linear-attention layers (mamba_d_state)"),
        ({"full_attention_interval": 4}, "linear-attention layers (full_attention_interval)"),
        ({"is_encoder_decoder": True}, "cross-attention"),
        ({"index_topk": 2048}, "the index of sparse attention"),
        ({"attention_chunk_size": 8192}, "chunked local attention"),
        ({"num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_key_value_heads": "many"}, "num_key_value_heads is 'many'"),
        ({"kv_lora_rank": 512, "model_type": "kimi_k2"}, "has no qk_rope_head_dim"),
        ({"kv_lora_rank": 256, "model_type": "minicpm3"}, "a latent (kv_lora_rank) that not all"),
    ],
)
def test_what_is_not_counted_is_refused_by_its_name(said: dict[str, Any], why: str) -> None:
    message = refused(**said)
    assert why in message
    assert message.startswith("model: ")


def test_a_configuration_without_the_stage_is_refused_with_what_it_has() -> None:
    with pytest.raises(UncountedCache, match="no singer_config, and no layers of its own"):
        kv.layout_of(QWEN3, "singer")


def test_a_pattern_says_which_layers_have_a_window() -> None:
    assert of(sliding_window=64, sliding_window_pattern=3).allocated == 6
    assert of(sliding_window=64, sliding_window_pattern=4).allocated == 6
