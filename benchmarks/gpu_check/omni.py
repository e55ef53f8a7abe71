"""Three stages of Qwen2.5-Omni with random weights, from transformers' own classes.

Lives here: their models, sizes, and the computation of one request. The thinker writes text tokens,
the talker codec tokens for them, and token2wav a sound for those. The last one is in float32, since
transformers asks for that. Nothing is downloaded.
"""

import hashlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import Module
from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as configuration
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

from benchmarks.gpu_check.settings import GIB, PROMPT, STAGES

#: Bytes of the real model that do not grow with its depth: embeddings, heads, vocoder.
_FIXED = 27 * GIB // 10
#: Bytes of its layers.
_LAYERS = 18 * GIB
#: Depths of the real model's parts.
_DEPTHS = {"text": 28, "vision": 32, "audio": 32, "talker": 24, "dit": 22}

#: Positions are of three kinds; half a head's dimensions, each in these shares.
_ROPE = {"mrope_section": [16, 24, 24], "rope_type": "default", "rope_theta": 1e6}


class Size(NamedTuple):
    """Depths of the parts, width (real or tiny), and sizes of a request."""

    depths: dict[str, int]
    tiny: bool
    text: int = 48
    codes: int = 96
    steps: int = 10


TINY = Size(dict.fromkeys(_DEPTHS, 2), tiny=True, text=6, codes=8, steps=3)


def size_for(nbytes: int) -> Size:
    """About `nbytes` of weights in all three; TINY if that is less than the real embeddings."""
    if nbytes < 2 * _FIXED:
        return TINY
    share = (nbytes - _FIXED) / _LAYERS
    return Size({part: max(round(depth * share), 2) for part, depth in _DEPTHS.items()}, tiny=False)


def make(stage: str, size: Size, where: torch.device) -> Module:
    """A stage's model on `where`, with weights seeded by its name."""
    torch.manual_seed(STAGES.index(stage))
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if stage == "token2wav" else torch.bfloat16)
    try:
        with torch.device(where):
            model: Module = _MAKERS[stage](size)
    finally:
        torch.set_default_dtype(kept)
    return model.eval().requires_grad_(False)


def _text(size: Size) -> dict[str, Any]:
    depth = size.depths["text"]
    common: dict[str, Any] = {"num_hidden_layers": depth, "max_window_layers": depth}
    common["rope_scaling"] = dict(_ROPE)
    if not size.tiny:
        return common
    common |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    common |= {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
    return {**common, "initializer_range": 0.08}  # otherwise it would repeat one token for ever


def _thinker(size: Size) -> Module:
    audio: dict[str, Any] = {"encoder_layers": size.depths["audio"]}
    vision: dict[str, Any] = {"depth": size.depths["vision"]}
    text = _text(size)
    if size.tiny:
        text.pop("head_dim")
        audio |= {"d_model": 64, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}
        audio["output_dim"] = 256
        vision |= {"hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
        vision["out_hidden_size"] = 256
    else:
        vision["hidden_size"] = 1280  # the class's own default is another model's
    config = configuration.Qwen2_5OmniThinkerConfig(
        text_config=text, audio_config=audio, vision_config=vision
    )
    model: Module = modeling.Qwen2_5OmniThinkerForConditionalGeneration._from_config(config)
    return model


def _talker(size: Size) -> Module:
    depth = size.depths["talker"]
    shape: dict[str, Any] = {"hidden_size": 896, "num_attention_heads": 12}
    if size.tiny:
        shape = {**_text(size), "embedding_size": 256}
        shape.pop("vocab_size")
    shape |= {"num_hidden_layers": depth, "max_window_layers": depth, "rope_scaling": dict(_ROPE)}
    config = configuration.Qwen2_5OmniTalkerConfig(**shape)
    model: Module = modeling.Qwen2_5OmniTalkerForConditionalGeneration._from_config(config)
    return model


def _token2wav(size: Size) -> Module:
    dit: dict[str, Any] = {"num_hidden_layers": size.depths["dit"]}
    vocoder: dict[str, Any] = {}
    if size.tiny:
        dit |= {"hidden_size": 128, "num_attention_heads": 2, "emb_dim": 32}
        vocoder["upsample_initial_channel"] = 128
    config = configuration.Qwen2_5OmniToken2WavConfig(dit_config=dit, bigvgan_config=vocoder)
    model: Module = modeling.Qwen2_5OmniToken2WavModel._from_config(config)
    return model


_MAKERS: dict[str, Callable[[Size], Module]] = {
    "thinker": _thinker,
    "talker": _talker,
    "token2wav": _token2wav,
}


# --- a request ---------------------------------------------------------------------------


class Made(NamedTuple):
    """A stage's output: tokens, or a digest of a sound.

    `first_s` is the time of the first part, by the clock that all processes share.
    """

    tokens: list[int]
    sound: str
    first_s: float


def run(stage: str, model: Any, size: Size, tokens: list[int]) -> Made:
    """The stage's output for the tokens of the stage before it. Waits until it is computed."""
    where = next(model.parameters()).device
    if stage == "token2wav":
        return _sound(model, size, tokens, where)
    if stage == "thinker":
        return _decoded(
            model.model, model.lm_head, model.get_input_embeddings(), tokens, size.text, where
        )
    embedded = model.get_input_embeddings()
    tokens = [token % model.codebook_size for token in tokens]

    def embed(codes: torch.Tensor) -> Any:
        return model.thinker_to_talker_proj(embedded(codes))

    return _decoded(model.model, model.codec_head, embed, tokens, size.codes, where)


def _decoded(
    model: Any, head: Any, embed: Any, tokens: list[int], count: int, where: torch.device
) -> Made:
    codes = torch.tensor([tokens], device=where)
    cache, out, first_s = None, [], 0.0
    for _ in range(count):
        made = model(inputs_embeds=embed(codes), past_key_values=cache, use_cache=True)
        cache = made.past_key_values
        codes = head(made.last_hidden_state[:, -1]).argmax(-1, keepdim=True)
        out.append(int(codes))  # as for a client that gets each token
        first_s = first_s or time.monotonic()
    return Made(out, "", first_s)


def _sound(model: Any, size: Size, tokens: list[int], where: torch.device) -> Made:
    torch.manual_seed(0)  # the sound begins as noise
    dit = model.code2wav_dit_model.config
    codes = torch.tensor([tokens], device=where) % dit.num_embeds
    voice = torch.ones(1, dit.enc_emb_dim, device=where)
    like = torch.ones(1, 2 * PROMPT, dit.mel_dim, device=where)
    wave = model(codes, conditioning=voice, reference_mel=like, num_steps=size.steps)
    heard = wave.float().cpu().contiguous()
    first_s = time.monotonic()
    known = hashlib.blake2b(heard.view(torch.uint8).numpy().tobytes(), digest_size=12).hexdigest()
    return Made([], known, first_s)
