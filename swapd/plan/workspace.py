"""What a stage needs for itself while it computes: assumed, where nobody says. Pure.

vLLM measures it when a stage starts, and nothing else can know it. A step's activations grow with
the tokens of a step; buffers, kernels and encoders do not.
"""

from collections.abc import Mapping
from typing import Any

from swapd.plan import kv
from swapd.plan.pipelines import Kind

_GIB = 1 << 30

#: Where the model is not known.
USUAL_BYTES: dict[Kind, int] = {"ar": 2 * _GIB, "generation": 2 * _GIB, "diffusion": 4 * _GIB}
#: What of it no step's tokens change: buffers, the sampler, kernels, encoders.
_BASE_BYTES = 1 * _GIB
#: Tokens of a step, where nobody says: as vLLM-Omni has it.
STEP_TOKENS = 32768
_ITEM_BYTES = 2


def of_decoder(config: Mapping[str, Any], stage: str, step_tokens: int) -> int:
    """Bytes that steps of so many tokens (`max_num_batched_tokens`) need in one process.

    `config` is the model's config.json. Counted are what is between two layers, and the widest
    layer: queries, keys, values, what attention gives, and the MLP, of experts all that a token
    goes to. Not divided among processes: what is between layers is not. Raises: kv.UncountedCache.
    """
    decoder = kv.decoder_of(config, stage)
    hidden = kv.hidden_size(decoder, stage)
    heads = 2 * kv.heads(decoder, stage) + 2 * kv.kv_heads(decoder, stage)
    values = 4 * hidden + heads * kv.head_size(decoder, stage) + _mlp(decoder, hidden)
    return _BASE_BYTES + step_tokens * values * _ITEM_BYTES


def _mlp(decoder: Mapping[str, Any], hidden: int) -> int:
    """Numbers of a token in an MLP: gate and up, and their product; of each expert also what
    comes out, which has the place of gate and up.
    """
    experts, expert = (_said(decoder, k) for k in ("num_experts_per_tok", "moe_intermediate_size"))
    if experts and expert:
        shared = 3 * _said(decoder, "shared_expert_intermediate_size")
        return experts * (max(2 * expert, hidden) + expert) + shared
    return 3 * (_said(decoder, "intermediate_size") or 4 * hidden)


def _said(decoder: Mapping[str, Any], key: str) -> int:
    value = decoder.get(key)
    return value if type(value) is int and 0 < value < 1 << 30 else 0
