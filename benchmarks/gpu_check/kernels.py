"""vLLM's kernels that keep weights in their own way, each with the plugin beside a plain engine.

The table in tests/vllm/README.md lists the weights that move and those that stay, and the tests on
a CPU. The kernels here exist on a GPU only.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.gpu_check.engines import dense, same
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import Settings

FP8 = "fp8, quantised as it is loaded: with the plugin the tokens of plain vLLM"
MARLIN = "fp8 repacked for Marlin: with the plugin the tokens of plain vLLM"
LATENT = "MLA, views of weights: with the plugin the tokens of plain vLLM"
MAMBA = "Mamba, views of weights: with the plugin the tokens of plain vLLM"


class Kind(NamedTuple):
    """A model, an engine's options, and part of the name that vLLM must choose."""

    name: str
    config: Mapping[str, Any]
    options: Mapping[str, Any]
    chosen: str


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    for kind in kinds(settings):
        with check.part(kind.name, guarantee=True):
            compare(check, settings, kind)


def compare(check: Check, settings: Settings, kind: Kind) -> None:
    def wanted(about: Mapping[str, Any]) -> bool:
        return any(kind.chosen in name for name in (*about["methods"], *about["layers"]))

    options = {"enforce_eager": True, **kind.options}
    same(check, settings, kind.name, kind.config, options, wanted)


def kinds(settings: Settings) -> tuple[Kind, ...]:
    """All kinds."""
    fp8 = {"quantization": "fp8"}
    return (
        Kind(FP8, dense(settings, 4), fp8, "Fp8"),
        Kind(MARLIN, dense(settings, 4), {**fp8, "linear_backend": "marlin"}, "Marlin"),
        Kind(LATENT, _latent(settings), {}, "MLA"),
        Kind(MAMBA, _mamba(settings), {}, "Mamba"),
    )


def _latent(settings: Settings) -> dict[str, Any]:
    return {
        **dense(settings, 4),
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_attention_heads": 4 if settings.on_cpu else 16,
        "num_key_value_heads": 4 if settings.on_cpu else 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64 if settings.on_cpu else 1024,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 64,
    }


def _mamba(settings: Settings) -> dict[str, Any]:
    hidden = 256 if settings.on_cpu else 2048
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": 4,
        "vocab_size": 1024 if settings.on_cpu else 32000,
        "state_size": 128,
        "expand": 2,
        "head_dim": 64,
        "num_heads": 2 * hidden // 64,
        "n_groups": 1,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "rms_norm": True,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    }
