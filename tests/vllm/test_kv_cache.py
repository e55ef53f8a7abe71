"""The KV caches of a plan are those that vLLM itself computes for the same configuration.

This needs no weights: vLLM's layers say which caches they need, and its own functions the sizes.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from swapd.plan import kv
from swapd.plan.kv import KvCache, KvLayout
from tests.plan import omni
from tests.vllm import models, zoo
from tests.vllm.engines import Nursery

MIB = 1 << 20
#: A copy of `kv_cache.SHARDS`, because that module imports vLLM.
SHARDS = (1, 2, 4, 8, 16)

_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}


class Case(NamedTuple):
    """A model and the way in which it is served."""

    config: Mapping[str, Any]
    stage: str = "model"
    max_model_len: int | None = None
    block_size: int = 16
    dtype: str = "auto"
    arguments: Mapping[str, Any] = {}

    @property
    def layout(self) -> KvLayout:
        return kv.layout_of(self.config, self.stage)

    def cache(self, shards: int = 1) -> KvCache:
        """The cache as a plan counts it."""
        length = self.max_model_len or self.layout.longest
        assert length is not None
        return kv.cache_of(
            self.layout,
            max_model_len=length,
            block_tokens=self.block_size,
            item_bytes=kv.item_bytes(self.dtype, None),
            shards=shards,
        )

    @property
    def memory(self) -> list[int]:
        """Caches to try: the smallest of the plan, a byte less, and one that holds ten requests."""
        least = kv.least_bytes(self.cache())
        return [least, least - 1, 10 * least]

    @property
    def asked(self) -> dict[str, Any]:
        said: dict[str, Any] = {}
        if self.max_model_len:
            said["max_model_len"] = self.max_model_len
        said |= {"block_size": self.block_size, "dtype": self.dtype, **self.arguments}
        return {"config": self.config, "arguments": said, "memory": self.memory}


def of_omni(config: Mapping[str, Any], stage: str, architecture: str, **more: Any) -> Case:
    """A stage of an omni model, as in vllm-omni's pipelines."""
    said = {"model_stage": stage, "model_arch": architecture, "stage_id": 0, "worker_type": "ar"}
    return Case(config, stage, arguments={**said, "hf_config_name": f"{stage}_config"}, **more)


def small(kind: str, architecture: str, **more: Any) -> dict[str, Any]:
    return {**_SMALL, "model_type": kind, "architectures": [architecture], **more}


QWEN3, QWEN2_5 = "Qwen3OmniMoeForConditionalGeneration", "Qwen2_5OmniForConditionalGeneration"
_TINY = models.config(models.MODELS["talker"])
#: Cases for which the plan has the same figures as vLLM, to a byte.
SAME: dict[str, Case] = {
    "Qwen3-Omni's thinker": of_omni(omni.QWEN3, "thinker", QWEN3),
    "Qwen3-Omni's talker": of_omni(omni.QWEN3, "talker", QWEN3),
    "Qwen2.5-Omni's thinker": of_omni(omni.QWEN2_5, "thinker", QWEN2_5),
    "Qwen2.5-Omni's talker": of_omni(omni.QWEN2_5, "talker", QWEN2_5),
    **{name: Case(models.config(model)) for name, model in models.MODELS.items()},
    "a length that fills no block": Case(_TINY, max_model_len=301),
    "other blocks": Case(_TINY, max_model_len=301, block_size=32),
    "numbers of 32 bits": Case(_TINY, dtype="float32"),
    "as many KV heads as heads": Case(
        {k: v for k, v in small("llama", "LlamaForCausalLM").items() if k != "num_key_value_heads"}
    ),
    "positions that are scaled": Case(
        small(
            "llama",
            "LlamaForCausalLM",
            rope_scaling={"rope_type": "linear", "factor": 2.0},
            rope_theta=10000,
        )
    ),
    "a latent": Case(
        small(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            **zoo.LATENT,
        )
    ),
}
#: Cases for which it has at least vLLM's: it ignores sliding windows.
NO_LESS: dict[str, Case] = {
    "windows in all layers": Case(small("mistral", "MistralForCausalLM", sliding_window=64)),
    "windows in every other layer": Case(
        small("gemma2", "Gemma2ForCausalLM", sliding_window=64, query_pre_attn_scalar=32)
    ),
    "windows in five of six layers": Case(
        small(
            "gemma3_text",
            "Gemma3ForCausalLM",
            sliding_window=64,
            query_pre_attn_scalar=32,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
        )
    ),
    "windows in five of eight layers": Case(
        small(
            "gemma3_text",
            "Gemma3ForCausalLM",
            sliding_window=4000,
            query_pre_attn_scalar=32,
            num_hidden_layers=8,
            layer_types=["sliding_attention"] * 5 + ["full_attention"] * 3,
        )
    ),
}
#: A stage without a KV cache, and its configuration.
NONE = of_omni(omni.QWEN3, "thinker", QWEN3)
NONE = NONE._replace(arguments={**NONE.arguments, "model_stage": "code2wav"})


@pytest.fixture(scope="module")
def said(nursery: Nursery) -> dict[str, dict[str, Any]]:
    """vLLM's figures for each case."""
    cases = {**SAME, **NO_LESS, "none": NONE}
    figures = nursery.call("tests.vllm.kv_cache:figures", [case.asked for case in cases.values()])
    return dict(zip(cases, figures, strict=True))


@pytest.mark.parametrize("name", SAME)
def test_a_request_takes_what_vllm_says_it_takes(
    name: str, said: dict[str, dict[str, Any]]
) -> None:
    found, cache = said[name], SAME[name].cache()
    assert found["max_model_len"] == cache.max_model_len
    assert found["layers"] == SAME[name].layout.layers
    assert found["block"] == cache.block_bytes
    assert found["request"] == found["sum"] == kv.least_bytes(cache) - cache.block_bytes


@pytest.mark.parametrize("name", SAME)
def test_vllm_starts_with_the_smallest_cache_of_the_plan_and_with_no_less(
    name: str, said: dict[str, dict[str, Any]]
) -> None:
    cache = SAME[name].cache()
    least, less, more = said[name]["caches"]
    # vLLM counts a block that it keeps for itself
    assert least == kv.tokens_in(cache, kv.least_bytes(cache)) + cache.block_tokens
    assert more == kv.tokens_in(cache, 10 * kv.least_bytes(cache)) + cache.block_tokens
    assert "To serve at least one request" in less
    (longest,) = re.findall(r"estimated maximum model length is (\d+)", less)
    assert int(longest) == kv.tokens_in(cache, kv.least_bytes(cache) - 1)


@pytest.mark.parametrize("name", SAME)
def test_heads_are_divided_among_processes_as_vllm_divides_them(
    name: str, said: dict[str, dict[str, Any]]
) -> None:
    case = SAME[name]
    heads = {shards: case.cache(shards).block_bytes for shards in SHARDS}
    one = case.cache().block_bytes // (1 if case.layout.latent else case.layout.heads)
    assert [nbytes // one for nbytes in heads.values()] == said[name]["heads"]


@pytest.mark.parametrize("name", NO_LESS)
def test_windows_are_counted_as_no_less_than_vllm_counts_them(
    name: str, said: dict[str, dict[str, Any]]
) -> None:
    found, cache = said[name], NO_LESS[name].cache()
    assert found["layers"] == NO_LESS[name].layout.layers
    assert found["request"] <= kv.least_bytes(cache) - cache.block_bytes
    assert isinstance(found["caches"][0], int)  # vLLM starts with the smallest cache of the plan


def test_qwen3_omnis_code2wav_has_no_cache(said: dict[str, dict[str, Any]]) -> None:
    assert (said["none"]["layers"], said["none"]["request"]) == (0, 0)
