"""How large a stage's KV cache is, by the configuration of its model. Pure: no library is imported.

A cache is divided into blocks of some tokens; a block has what all layers of one process remember
of these tokens. vLLM keeps one block for itself (its null block), and starts only if the others
hold one request of `max_model_len` tokens.

Counted are decoders whose layers attend to all tokens: with a key and a value for each KV head, or
one latent for all heads (MLA). Layers with a sliding window are counted as if they had none, which
is never less than vLLM allocates. Whatever else remembers (state-space layers, cross-attention,
...) is refused by its name.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec

from swapd.plan.advise import PlanError
from swapd.shared.text import plain

#: Tokens of a block where nobody says, as vLLM has it on GPUs.
BLOCK_TOKENS = 16

#: Tokens of the largest block of a layer with a window: kernels may want larger ones than others.
_WINDOW_BLOCK_TOKENS = 128

#: Nothing in a configuration is larger.
_COUNT_MAX = 1 << 30
#: Of names that are quoted, how many, and how much of each.
_NAMES_MAX = 5
_NAME_MAX = 80
#: Under which keys a model keeps the configuration of its decoder.
_DECODERS = ("text_config", "llm_config", "language_config")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
#: Kinds of rotary embeddings whose `factor` is in the length already.
_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
#: Models that have a latent (`kv_lora_rank`) in their cache; others write keys and values there.
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")
#: Where one of these is said, there are layers that remember in another way.
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
#: Bytes of one number in a cache, by vLLM's names for `kv_cache_dtype` and `dtype`.
_ITEM_BYTES = {
    **dict.fromkeys(("bfloat16", "float16", "half"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("float32", "float"), 4),
}


class UncountedCache(PlanError):
    """The size of a KV cache cannot be said; the message says why, and what can be given."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What the decoder of a model remembers of a token, whatever it is served with."""

    #: Layers of the decoder.
    layers: int
    #: Layers that a cache has room for: more, where vLLM fills up groups of layers of two kinds.
    allocated: int
    #: KV heads of the whole model, which tensor parallelism divides; 1 with `latent`.
    heads: int
    #: Numbers that one head keeps: a key and a value; or those of a latent.
    values: int
    #: Whether each process has the whole of it (MLA).
    latent: bool = False
    #: Whether layers have a sliding window, which is not counted.
    windows: bool = False
    #: Tokens of the longest request that the model is made for; None if it does not say.
    longest: int | None = None


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache of one process of a stage."""

    #: Tokens of the longest request.
    max_model_len: int
    #: Tokens of a block, and bytes of one, all layers together.
    block_tokens: int
    block_bytes: int
    #: Blocks more that a request may need for a sliding window, which can begin within one.
    partial: int = 0


def layout_of(config: Mapping[str, Any], stage: str) -> Layout:
    """What the decoder of `stage` remembers of each token.

    `config` is a model's config.json, `stage` what the stage is called in it: where there is a
    `thinker_config` the stage thinker has that one. Raises: UncountedCache.
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
    return Layout(
        layers=layers,
        allocated=_filled_up(full, sliding),
        heads=heads,
        values=values,
        latent=latent,
        windows=sliding > 0,
        longest=_longest(decoder),
    )


def cache_of(
    layout: Layout, *, max_model_len: int, block_tokens: int, item_bytes: int, shards: int
) -> Cache:
    """The cache of one of `shards` processes among which the heads are divided.

    `max_model_len` and `block_tokens` are tokens, `item_bytes` bytes of one number. With fewer
    heads than processes each process has one, as vLLM does it.
    """
    heads = 1 if layout.latent else max(1, layout.heads // shards)
    return Cache(
        max_model_len=max_model_len,
        block_tokens=block_tokens,
        block_bytes=block_tokens * layout.allocated * heads * layout.values * item_bytes,
        partial=-(-_WINDOW_BLOCK_TOKENS // block_tokens) if layout.windows else 0,
    )


def token_bytes(cache: Cache) -> int:
    """Bytes that one token takes of a process."""
    return cache.block_bytes // cache.block_tokens


def request_bytes(cache: Cache, tokens: int | None = None) -> int:
    """Bytes that one request takes of a process, in whole blocks; None: of `max_model_len`."""
    length = cache.max_model_len if tokens is None else tokens
    return (-(-length // cache.block_tokens) + cache.partial) * cache.block_bytes


def least_bytes(cache: Cache) -> int:
    """Bytes of the smallest cache with which vLLM starts: one request, and the null block."""
    return request_bytes(cache) + cache.block_bytes


def tokens_in(cache: Cache, nbytes: int) -> int:
    """Tokens of the longest request that fits a cache of `nbytes`; 0 if none does."""
    blocks = nbytes // cache.block_bytes - 1 - cache.partial
    return max(0, blocks) * cache.block_tokens


def item_bytes(dtype: str | None, kv_cache_dtype: str | None) -> int:
    """Bytes of one number in a cache, by what a stage says of its types (None: nothing).

    Without a word it is the model's type, and vLLM runs what was saved with 32 bits with 16.
    Raises: UncountedCache.
    """
    said = kv_cache_dtype if kv_cache_dtype not in (None, "auto") else dtype
    if said in (None, "auto"):
        return 2
    if said not in _ITEM_BYTES:
        raise UncountedCache(
            f"how large a KV cache of {_listed([said])} is, is not known; say kv_cache_memory_bytes"
        )
    return _ITEM_BYTES[said]


# --- configurations ------------------------------------------------------------------------


def decoder_of(config: Mapping[str, Any], stage: str) -> Mapping[str, Any]:
    """The configuration of a stage's decoder, within that of the model. Raises: UncountedCache."""
    found = config
    for key in (f"{stage}_config", *_DECODERS):
        if isinstance(inner := found.get(key), dict):
            found = inner
    if found is config and not any(key in config for key in _LAYERS):
        of = _listed(k for k, v in config.items() if isinstance(v, dict)) or "nothing"
        raise UncountedCache(
            f"the model's config.json has no {stage}_config, and says nothing of layers itself; "
            f"it has {of}. Call the stage as the model does (component), or say "
            f"kv_cache_memory_bytes"
        )
    return found


def kv_heads(decoder: Mapping[str, Any], stage: str) -> int:
    """KV heads of a decoder: as many as heads where it does not say. Raises: UncountedCache."""
    if any(decoder.get(key) for key in _KV_HEADS):
        return _count(decoder, stage, *_KV_HEADS)
    return heads(decoder, stage)


def heads(decoder: Mapping[str, Any], stage: str) -> int:
    """Attention heads of a decoder. Raises: UncountedCache."""
    return _count(decoder, stage, "num_attention_heads", "n_head", "num_heads")


def hidden_size(decoder: Mapping[str, Any], stage: str) -> int:
    """Numbers of a token between two layers. Raises: UncountedCache."""
    return _count(decoder, stage, "hidden_size", "n_embd", "d_model")


def head_size(decoder: Mapping[str, Any], stage: str) -> int:
    """Numbers of one head. Raises: UncountedCache."""
    if decoder.get("head_dim"):
        return _count(decoder, stage, "head_dim")
    found = hidden_size(decoder, stage) // heads(decoder, stage)
    if not found:
        raise UncountedCache(f"{stage}: its model has more heads than hidden_size in config.json")
    return found


def _listed(names: Iterable[str]) -> str:
    """A few of them, in one line: a configuration may hold anything."""
    return ", ".join(plain(name[:_NAME_MAX]) for name in islice(names, _NAMES_MAX))


def _count(decoder: Mapping[str, Any], stage: str, *names: str) -> int:
    """The first of these numbers that is said."""
    for name in names:
        value = decoder.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 < value < _COUNT_MAX:
            raise UncountedCache(f"{stage}: {name} is {value!r} in the model's config.json")
        return value
    raise UncountedCache(
        f"{stage}: the model's config.json says nothing of {names[0]}; say kv_cache_memory_bytes"
    )


def _refuse_others(decoder: Mapping[str, Any], stage: str) -> None:
    """Raises: UncountedCache, for layers that remember otherwise."""
    types = decoder.get("layer_types")
    listed = {str(one) for one in types} if isinstance(types, list) else set()
    why = _listed(sorted(listed - {_FULL, _SLIDING}))
    if not why and decoder.get("kv_lora_rank") and decoder.get("model_type") not in _LATENT:
        why = "a latent (kv_lora_rank) that not all models keep in their cache"
    if not why:
        why = next((f"{what} ({key})" for key, what in _UNCOUNTED.items() if decoder.get(key)), "")
    if why:
        raise UncountedCache(
            f"{stage}: its model has {why}, whose memory the plan does not count; say "
            f"kv_cache_memory_bytes of the stage, as vLLM's log has it"
        )


def _kinds(decoder: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """How many layers attend to all tokens, and how many to a window."""
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
    """Layers in vLLM's groups, which are all as large as the smaller kind, or as the larger.

    As the larger, where that is less than half as large again.
    """
    if not (full and sliding):
        return full + sliding
    small, large = sorted((full, sliding))
    group = large if 2 * large < 3 * small else small
    return group * (-(-full // group) + -(-sliding // group))


def _longest(decoder: Mapping[str, Any]) -> int | None:
    said = [v for k in _LENGTHS if type(v := decoder.get(k)) is int and 0 < v < _COUNT_MAX]
    if type(length := decoder.get("model_max_length")) is int and 0 < length < _COUNT_MAX:
        said = [length]
    rope = decoder.get("rope_parameters") or decoder.get("rope_scaling") or {}
    factor = rope.get("factor") if isinstance(rope, dict) else None
    scaled = isinstance(factor, int | float) and 1 < factor < _COUNT_MAX
    if not said:
        return None
    if scaled and (rope.get("rope_type") or rope.get("type")) not in _SCALED:
        return int(min(said) * float(factor or 1))
    return min(said)
