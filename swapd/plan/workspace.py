"""Estimates a stage's working memory, where no setting has it. Pure.

vLLM measures it when a stage starts; before that it is unknown. Activations grow with the tokens
of a step; buffers, kernels and encoders do not.
"""

from collections.abc import Mapping
from typing import Any

from swapd.plan import kv
from swapd.plan.omni import Kind

_GIB = 1 << 30

#: Estimates for an unknown model.
USUAL_BYTES: dict[Kind, int] = {"ar": 2 * _GIB, "generation": 2 * _GIB, "diffusion": 4 * _GIB}
#: The part that does not depend on a step's tokens: buffers, the sampler, kernels, encoders.
_BASE_BYTES = 1 * _GIB
#: Tokens of a step by default, as in vLLM-Omni.
STEP_TOKENS = 32768
_ITEM_BYTES = 2


def of_decoder(config: Mapping[str, Any], stage: str, step_tokens: int) -> int:
    """Bytes that steps of so many tokens (`max_num_batched_tokens`) need in one process.

    `config` is the model's config.json. The sum has the values between two layers, and those of
    the widest layer: queries, keys, values, the output of attention, and the MLP with all experts
    of a token. Tensor parallelism does not divide it, as it does not divide the values between
    layers. Raises: kv.UncountedCache.
    """
    decoder = kv.decoder_of(config, stage)
    hidden = kv.hidden_size(decoder, stage)
    heads = 2 * kv.heads(decoder, stage) + 2 * kv.kv_heads(decoder, stage)
    values = 4 * hidden + heads * kv.head_size(decoder, stage) + _mlp(decoder, hidden)
    return _BASE_BYTES + step_tokens * values * _ITEM_BYTES


def _mlp(decoder: Mapping[str, Any], hidden: int) -> int:
    """Numbers of a token in an MLP: gate, up, and their product. For each expert also its output,
    in the place of gate and up.
    """
    experts, expert = (_said(decoder, k) for k in ("num_experts_per_tok", "moe_intermediate_size"))
    if experts and expert:
        shared = 3 * _said(decoder, "shared_expert_intermediate_size")
        return experts * (max(2 * expert, hidden) + expert) + shared
    return 3 * (_said(decoder, "intermediate_size") or 4 * hidden)


def _said(decoder: Mapping[str, Any], key: str) -> int:
    value = decoder.get(key)
    return value if type(value) is int and 0 < value < 1 << 30 else 0
