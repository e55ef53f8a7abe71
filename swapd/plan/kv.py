"""Computes a stage's KV cache and workspace from its model's configuration. Pure, no library.

A block of a cache has the state of all layers of one process for some tokens. vLLM keeps one block
for itself (its null block), and starts only if the others hold one request of `max_model_len`
tokens.

This module counts decoders whose layers attend to all tokens: with a key and a value for each KV
head, or with one latent for all heads (MLA). A layer with a sliding window is counted as a full
layer, which is never less than vLLM allocates. Any other state (state-space layers,
cross-attention, ...) is refused by name.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec

from swapd.plan.advice import PlanError
from swapd.plan.omni import Kind
from swapd.shared.text import plain

#: As in vLLM on GPUs.
BLOCK_TOKENS = 16

#: Tokens of the largest block of a layer with a window: some kernels need larger blocks.
_WINDOW_BLOCK_TOKENS = 128

_COUNT_MAX = 1 << 30
_NAMES_MAX = 5
_NAME_MAX = 80
#: Keys of the decoder in a model's configuration.
_DECODERS = ("text_config", "llm_config", "language_config")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
#: Kinds of rotary embeddings for which the length already includes `factor`.
_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
#: Models that cache a latent (`kv_lora_rank`); other models with a latent cache keys and values.
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")
_UNCOUNTED = {
    **dict.fromkeys(
        (
            *("layers_block_type", "hybrid_override_pattern", "attn_layer_period"),
            *("attn_layer_indices", "full_attn_idxs", "full_attention_interval"),
            *("mamba_d_state", "mamba_num_heads", "ssm_cfg", "ssm_state_size", "state_size"),
            *("linear_attn_config", "linear_num_value_heads", "attn_type_list", "mb_per_layer"),
        ),
        "state-space or linear-attention layers",
    ),
    **dict.fromkeys(("is_encoder_decoder", "cross_attention_layers"), "cross-attention"),
    **dict.fromkeys(("index_topk", "compress_ratios"), "the index of sparse attention"),
    **dict.fromkeys(
        ("block_configs", "global_head_dim", "swa_num_key_value_heads"), "layers of several shapes"
    ),
    "attention_chunk_size": "chunked local attention",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ITEM_BYTES = {
    **dict.fromkeys(("bfloat16", "float16", "half"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("float32", "float"), 4),
}


class UncountedCache(PlanError):
    """The size of a KV cache is unknown; the message has the reason, and the setting to give."""


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a decoder for one token."""

    layers: int
    #: Layers in a cache: more than `layers` if vLLM pads groups of two kinds.
    allocated: int
    #: KV heads of the whole model; 1 for a latent.
    heads: int
    #: Numbers of one head (a key and a value), or of the latent.
    values: int
    #: Whether each process has the whole state (MLA).
    latent: bool = False
    #: Whether layers have a sliding window; the size ignores it.
    windows: bool = False
    #: Longest supported request, in tokens; None if unknown.
    longest: int | None = None


class KvCache(msgspec.Struct, frozen=True, kw_only=True):
    max_model_len: int
    block_tokens: int
    block_bytes: int
    #: Extra blocks of a request for a sliding window that begins within a block.
    partial: int = 0


def layout_of(config: Mapping[str, Any], stage: str) -> KvLayout:
    """Return the layout of the decoder of `stage`.

    `config` is a model's config.json. `stage` is the stage's name in it: the stage thinker has
    `thinker_config`, if that exists. Raises: UncountedCache.
    """
    decoder = decoder_of(config, stage)
    _refuse_others(decoder, stage)
    layers = _count(decoder, stage, *_LAYERS)
    full, sliding = _kinds(decoder, layers)
    if decoder.get("kv_lora_rank"):
        heads, latent = 1, True
        values = sum(_count(decoder, stage, key) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    else:
        heads, latent = kv_heads(decoder, stage), False
        values = 2 * head_size(decoder, stage)
    lengths = _numbers(decoder, ("model_max_length",)) or _numbers(decoder, _LENGTHS)
    return KvLayout(
        layers=layers,
        allocated=_filled_up(full, sliding),
        heads=heads,
        values=values,
        latent=latent,
        windows=sliding > 0,
        longest=int(min(lengths) * _stretch(decoder)) if lengths else None,
    )


def cache_of(
    layout: KvLayout,
    *,
    max_model_len: int,
    block_tokens: int,
    item_bytes: int,
    shards: int,
    pipeline: int = 1,
) -> KvCache:
    """Return the cache of one process: `shards` divide the heads, and a `pipeline` the layers.

    `max_model_len` and `block_tokens` are tokens, `item_bytes` bytes of one number. With fewer
    heads than processes each process has one head, as in vLLM.
    """
    heads = 1 if layout.latent else max(1, layout.heads // shards)
    layers = -(-layout.allocated // pipeline)
    return KvCache(
        max_model_len=max_model_len,
        block_tokens=block_tokens,
        block_bytes=block_tokens * layers * heads * layout.values * item_bytes,
        partial=-(-_WINDOW_BLOCK_TOKENS // block_tokens) if layout.windows else 0,
    )


def token_bytes(cache: KvCache) -> int:
    return cache.block_bytes // cache.block_tokens


def least_bytes(cache: KvCache, requests: int = 1) -> int:
    """Return the bytes of the smallest cache for this many of the longest requests, and the null
    block. vLLM starts with that of one request."""
    blocks = -(-cache.max_model_len // cache.block_tokens) + cache.partial
    return (requests * blocks + 1) * cache.block_bytes


def tokens_in(cache: KvCache, nbytes: int) -> int:
    blocks = nbytes // cache.block_bytes - 1 - cache.partial
    return max(0, blocks) * cache.block_tokens


def item_bytes(dtype: str | None, kv_cache_dtype: str | None) -> int:
    """Return the bytes of one number in a cache (None: unset).

    The default is the model's type; vLLM runs 32-bit models with 16 bits. Raises: UncountedCache.
    """
    said = kv_cache_dtype if kv_cache_dtype not in (None, "auto") else dtype
    if said in (None, "auto"):
        return 2
    if said not in _ITEM_BYTES:
        raise UncountedCache(
            f"the size of a KV cache of {_listed([said])} is unknown; set kv_cache_memory_bytes"
        )
    return _ITEM_BYTES[said]


# --- configurations ------------------------------------------------------------------------


def decoder_of(config: Mapping[str, Any], stage: str) -> Mapping[str, Any]:
    found = config
    for key in (f"{stage}_config", *_DECODERS):
        if isinstance(inner := found.get(key), dict):
            found = inner
    if found is config and not any(key in config for key in _LAYERS):
        of = _listed(k for k, v in config.items() if isinstance(v, dict)) or "nothing"
        raise UncountedCache(
            f"the model's config.json has no {stage}_config, and no layers of its own; "
            f"it has {of}. Give the stage its name in the model (component), or set "
            f"kv_cache_memory_bytes"
        )
    return found


def kv_heads(decoder: Mapping[str, Any], stage: str) -> int:
    if any(decoder.get(key) for key in _KV_HEADS):
        return _count(decoder, stage, *_KV_HEADS)
    return heads(decoder, stage)


def heads(decoder: Mapping[str, Any], stage: str) -> int:
    return _count(decoder, stage, "num_attention_heads", "n_head", "num_heads")


def hidden_size(decoder: Mapping[str, Any], stage: str) -> int:
    """Return the numbers of a token between two layers. Raises: UncountedCache."""
    return _count(decoder, stage, "hidden_size", "n_embd", "d_model")


def head_size(decoder: Mapping[str, Any], stage: str) -> int:
    if decoder.get("head_dim"):
        return _count(decoder, stage, "head_dim")
    found = hidden_size(decoder, stage) // heads(decoder, stage)
    if not found:
        raise UncountedCache(f"{stage}: its model has more heads than hidden_size in config.json")
    return found


def _listed(names: Iterable[str]) -> str:
    """List only a few names, in one line: a configuration may hold any text."""
    return ", ".join(plain(name[:_NAME_MAX]) for name in islice(names, _NAMES_MAX))


def _count(decoder: Mapping[str, Any], stage: str, *names: str) -> int:
    for name in names:
        value = decoder.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 < value < _COUNT_MAX:
            raise UncountedCache(f"{stage}: {name} is {value!r} in the model's config.json")
        return value
    raise UncountedCache(
        f"{stage}: the model's config.json has no {names[0]}; set kv_cache_memory_bytes"
    )


def _refuse_others(decoder: Mapping[str, Any], stage: str) -> None:
    types = decoder.get("layer_types")
    listed = {str(one) for one in types} if isinstance(types, list) else set()
    why = _listed(sorted(listed - {_FULL, _SLIDING}))
    if not why and decoder.get("kv_lora_rank") and decoder.get("model_type") not in _LATENT:
        why = "a latent (kv_lora_rank) that not all models keep in their cache"
    if not why:
        why = next((f"{what} ({key})" for key, what in _UNCOUNTED.items() if decoder.get(key)), "")
    if why:
        raise UncountedCache(
            f"{stage}: its model has {why}, whose memory the plan does not count; set "
            f"kv_cache_memory_bytes of the stage to the value in vLLM's log"
        )


def _kinds(decoder: Mapping[str, Any], layers: int) -> tuple[int, int]:
    types = decoder.get("layer_types")
    if isinstance(types, list):
        sliding = sum(one == _SLIDING for one in types)
    elif not decoder.get("sliding_window") or decoder.get("use_sliding_window") is False:
        sliding = 0
    elif type(pattern := decoder.get("sliding_window_pattern")) is int and pattern > 0:
        sliding = layers - layers // pattern
    else:
        sliding = layers
    return max(0, layers - sliding), min(sliding, layers)


def _filled_up(full: int, sliding: int) -> int:
    """Return the number of layers after vLLM pads its groups.

    A group has as many layers as the smaller kind, or as the larger kind if that is less than 1.5
    times the smaller.
    """
    if not (full and sliding):
        return full + sliding
    small, large = sorted((full, sliding))
    group = large if 2 * large < 3 * small else small
    return group * (-(-full // group) + -(-sliding // group))


def _numbers(decoder: Mapping[str, Any], keys: Iterable[str]) -> list[int]:
    found = (decoder.get(key) for key in keys)
    return [number for number in found if type(number) is int and 0 < number < _COUNT_MAX]


def _stretch(decoder: Mapping[str, Any]) -> float:
    rope = decoder.get("rope_parameters") or decoder.get("rope_scaling")
    if not isinstance(rope, dict) or (rope.get("rope_type") or rope.get("type")) in _SCALED:
        return 1.0
    factor = rope.get("factor")
    return float(factor) if isinstance(factor, int | float) and 1 < factor < _COUNT_MAX else 1.0


_GIB = 1 << 30

# --- workspace -----------------------------------------------------------------------------
# vLLM measures a stage's working memory when the stage starts; before that it is unknown.
# Activations grow with the tokens of a step; buffers, kernels and encoders do not.

#: For an unknown model.
USUAL_BYTES: dict[Kind, int] = {"ar": 2 * _GIB, "generation": 2 * _GIB, "diffusion": 4 * _GIB}
#: Independent of a step's tokens: buffers, the sampler, kernels, encoders.
_BASE_BYTES = 1 * _GIB
#: As in vLLM-Omni.
STEP_TOKENS = 32768
_VALUE_BYTES = 2


def workspace_of(config: Mapping[str, Any], stage: str, step_tokens: int) -> int:
    """Return one process's bytes for steps of this many tokens (`max_num_batched_tokens`).

    `config` is the model's config.json. The sum has the values between two layers, and those of the
    widest layer: queries, keys, values, the output of attention, and the MLP with all experts of a
    token. Tensor parallelism does not divide the sum, as it does not divide the values between
    layers. Raises: UncountedCache.
    """
    decoder = decoder_of(config, stage)
    hidden = hidden_size(decoder, stage)
    used = 2 * heads(decoder, stage) + 2 * kv_heads(decoder, stage)
    values = 4 * hidden + used * head_size(decoder, stage) + _mlp(decoder, hidden)
    return _BASE_BYTES + step_tokens * values * _VALUE_BYTES


def _mlp(decoder: Mapping[str, Any], hidden: int) -> int:
    """Count a token's numbers in an MLP: gate, up and their product. An expert's output takes the
    place of gate and up."""
    experts, expert = (_said(decoder, k) for k in ("num_experts_per_tok", "moe_intermediate_size"))
    if experts and expert:
        shared = 3 * _said(decoder, "shared_expert_intermediate_size")
        return experts * (max(2 * expert, hidden) + expert) + shared
    return 3 * (_said(decoder, "intermediate_size") or 4 * hidden)


def _said(decoder: Mapping[str, Any], key: str) -> int:
    return next(iter(_numbers(decoder, (key,))), 0)
