"""KV caches that cannot take turns: refused by name when the stage starts, with what to change."""

from types import SimpleNamespace
from typing import Any

from tests.vllm.engines import MIB, Nursery, Scene
from tests.vllm.test_refused import refused

CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


def test_a_kv_connector_is_refused(scene: Scene) -> None:
    cache = {"kv_cache_memory_bytes": 8 * MIB}
    problem = refused(scene, {"kv": "auto"}, kv_transfer_config=CONNECTOR, **cache)
    assert problem.kind == "Unsupported"
    assert "leave out kv_transfer_config; or set kv: private" in problem.message
    assert "talker" in problem.message


def test_a_dtype_that_the_attention_does_not_know_is_refused(scene: Scene) -> None:
    """vLLM takes it on a CPU, and computes no sensible tokens with it."""
    cache = {"kv_cache_memory_bytes": 8 * MIB, "kv_cache_dtype": "int8_per_token_head"}
    problem = refused(scene, {"kv": "auto"}, **cache)
    assert problem.kind == "Unsupported"
    assert "CPU_ATTN has no kv_cache_dtype int8_per_token_head: set auto, fp8" in problem.message


def problem(layers: list[str], prefixes: bool, of_omni: dict[str, Any]) -> str | None:
    """The refusal of a cache of such layers; in a process that has vLLM."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    from swapd_client.vllm import kv
    from swapd_client.vllm.stage.kv_cache import KvTerms

    heads: Any = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = {
        "full": FullAttentionSpec(**heads),
        "sliding": SlidingWindowSpec(**heads, sliding_window=32),
        "mamba": MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,)),
    }
    groups = [KVCacheGroupSpec([f"layers.{i}"], specs[kind]) for i, kind in enumerate(layers)]
    cache = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    attention = SimpleNamespace(get_attn_backend=lambda: CPUAttentionBackend)
    names = [name for group in groups for name in group.layer_names]
    config = SimpleNamespace(
        kv_transfer_config=None,
        model_config=SimpleNamespace(omni_kv_config=of_omni),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names, attention)),
    )
    return kv.problem_with(cache, config, KvTerms("auto", prefixes, ()), apart=False)


CASES: list[tuple[list[str], bool, dict[str, Any], str | None]] = [
    (["full"], True, {}, None),
    (["full", "sliding"], False, {}, None),
    (["full", "sliding"], True, {}, "set enable_prefix_caching: false"),
    (["full", "mamba"], True, {}, "MambaSpec: swapd has not been tested with it"),
    (["mamba"], False, {}, "MambaSpec: swapd has not been tested with it"),
    (["full"], False, {"need_send_cache": True}, "leave out omni_kv_config.need_send_cache"),
    (["full"], False, {"need_recv_cache": True}, "leave out omni_kv_config.need_recv_cache"),
    (["full"], False, {"need_recv_cache": False}, None),
]


def problems() -> list[str | None]:
    return [problem(*asked) for *asked, _ in CASES]  # type: ignore[arg-type]


def test_layers_and_transfers_that_do_not_go_with_it(nursery: Nursery) -> None:
    for found, (*asked, said) in zip(nursery.call(f"{__name__}:problems"), CASES, strict=True):
        assert (found is None) if said is None else said in found, asked
