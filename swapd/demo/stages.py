"""Three models in the shape of Qwen2.5-Omni: thinker, talker and token2wav.

Each stage is the architecture of the transformers package with a reduced configuration and weights
drawn from a seed, so nothing is downloaded. The untrained output is noise, but it depends on every
layer that runs, so it shows whether a stage ran with its own weights. The vision tower does not
run, nor do embeddings of tokens that do not occur.

Each process builds one stage and passes dicts of CPU tensors on. Runs draw no entropy, and the
process uses one thread, since the number of threads decides the order of sums: so equal inputs give
bit-identical outputs on one kind of machine. Weights are never written.
"""

from __future__ import annotations

import math
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from swapd.demo import architectures
from swapd.demo.architectures import SPEECH_END, SPEECH_PAD, SPEECH_START

SEED = 7
THINKER_TOKENS = 12
TALKER_TOKENS = 24
# Points on the sampler's time axis. Each interval costs four evaluations of the diffusion model.
DIFFUSION_POINTS = 4
VOICE_FRAMES = 100
# The vocoder has no norms between its residual blocks. At a gain of 1 its signal grows until the
# clamp at its end flattens it; at 0.5 the sound is hardly audible.
TOKEN2WAV_GAIN = 0.7

SOUND_RATE = 16000
WAVE_RATE = 24000

Tensors = dict[str, torch.Tensor]


def build(stage: str) -> torch.nn.Module:
    """Build one stage, in eval mode."""
    import transformers  # takes seconds, and write_wav does not need it
    from transformers.initialization import no_init_weights

    # First import all: a module imported under `no_init_weights` may keep its stubs for good.
    name, settings = architectures.ARCHITECTURES[stage]
    kind = getattr(transformers, name)
    config = kind.config_class(**settings)
    with no_init_weights():  # drawing them twice would double the time
        module: torch.nn.Module = kind(config)
    _draw_weights(module, TOKEN2WAV_GAIN if stage == "token2wav" else 1.0)
    return module.eval().requires_grad_(requires_grad=False)


def generate_sound(seed: int) -> torch.Tensor:
    """Return a second of a sine sweep with some hiss: mono float32 samples at SOUND_RATE."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (torch.rand(2, generator=generator) * 1500 + 150).tolist()
    frequency = torch.linspace(low, high, SOUND_RATE, dtype=torch.float64)
    phase = torch.cumsum(2 * math.pi * frequency / SOUND_RATE, dim=0)
    hiss = torch.randn(SOUND_RATE, generator=generator) * 0.01
    return torch.sin(phase).float() * 0.5 + hiss


@torch.no_grad()
def run_thinker(module: torch.nn.Module, prompt: bytes, sound: torch.Tensor) -> Tensors:
    """Read the prompt and hear the sound; return the reply as the talker's inputs.

    "tokens" holds the bytes of the reply, "logits" the winning logit of each. The talker does not
    use these; they show a wrong weight that is too small to change a byte.
    """
    import transformers

    thinker: Any = module
    config = thinker.config
    extractor = transformers.WhisperFeatureExtractor(config.audio_config.num_mel_bins)
    features = extractor(
        sound.numpy(), sampling_rate=SOUND_RATE, padding=False, return_tensors="pt"
    )["input_features"]  # (1, mel bins, frames), log-mel
    # The audio tower halves the frames twice, and rounds differently each time.
    audio = [config.audio_token_index] * (((features.shape[-1] - 1) // 2 + 1) // 2)
    tokens = [config.audio_start_token_id, *audio, config.audio_end_token_id, *prompt]
    prompt_ids = torch.tensor([tokens])
    result = thinker.generate(
        input_ids=prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        input_features=features,
        feature_attention_mask=torch.ones(features.shape[0], features.shape[2]).long(),
        max_new_tokens=THINKER_TOKENS,
        do_sample=False,
        # Bytes only: untrained weights would also answer with placeholders for sounds.
        suppress_tokens=list(range(architectures.BYTE_TOKENS, config.text_config.vocab_size)),
        pad_token_id=config.text_config.pad_token_id,
        output_hidden_states=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    reply = result.sequences[:, prompt_ids.shape[1] :].clone()
    wiring = _talker_inputs(thinker, prompt_ids, reply, result.hidden_states)
    return {"tokens": reply, "logits": _winning_logits(result, reply), **wiring}


@torch.no_grad()
def run_talker(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """Speak the thinker's reply: return "codes", the vocoder's codec tokens.

    "logits" holds the winning logit of each, as in `run_thinker`.
    """
    talker: Any = module
    config, text_ids = talker.config, inputs["text_ids"]
    codec_ids = torch.full_like(text_ids, config.tts_codec_mask_token_id)
    codec_ids[:, -2] = config.tts_codec_pad_token_id
    codec_ids[:, -1] = config.tts_codec_start_token_id
    result = talker.generate(
        input_ids=codec_ids,
        input_text_ids=text_ids,
        attention_mask=torch.ones_like(text_ids),
        # A copy: the model adds the codec's start and pad embeddings in place.
        inputs_embeds=inputs["prompt_embeds"].clone(),
        thinker_reply_part=inputs["reply_embeds"],
        max_new_tokens=TALKER_TOKENS,
        do_sample=False,
        # After the reply every step has the same input, and untrained weights repeat one code.
        repetition_penalty=1.3,
        # Nor an end token: untrained weights end anywhere, and equal lengths compare better.
        suppress_tokens=list(range(architectures.CODES, config.vocab_size)),
        pad_token_id=config.tts_codec_pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    codes = result.sequences[:, codec_ids.shape[1] :].clone()
    return {"codes": codes, "logits": _winning_logits(result, codes)}


@torch.no_grad()
def run_token2wav(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """Turn codec tokens into sound: return "waveform", float32 samples at WAVE_RATE."""
    token2wav: Any = module
    config = token2wav.config.dit_config
    torch.manual_seed(SEED)  # of the voice, which the full model loads, and of the sampler's noise
    waveform = token2wav(
        inputs["codes"],
        conditioning=torch.randn(1, config.enc_emb_dim),
        reference_mel=torch.randn(1, VOICE_FRAMES, config.mel_dim),
        num_steps=DIFFUSION_POINTS,
    )
    return {"waveform": waveform.reshape(-1).clone()}


def write_wav(path: Path, waveform: torch.Tensor) -> None:
    samples = (waveform.detach().reshape(-1).clamp(-1.0, 1.0) * 32767).round()
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(WAVE_RATE)
        # wave files are little-endian
        out.writeframes(samples.numpy().astype("<i2").tobytes())


def _winning_logits(result: Any, tokens: torch.Tensor) -> torch.Tensor:
    return torch.stack(result.logits, dim=1).gather(2, tokens.unsqueeze(2)).squeeze(2)


def _talker_inputs(
    thinker: Any,
    prompt_ids: torch.Tensor,
    tokens: torch.Tensor,
    hidden_states: tuple[tuple[torch.Tensor, ...], ...],
) -> Tensors:
    """Wire the thinker's output to the talker as the full model's generate() does.

    `hidden_states` has an entry for the prompt and for each reply token but the last, from the
    first layer's input to the last layer's output.
    """
    prompt, *reply = [entry[0] + entry[-1] for entry in hidden_states]
    # The talker gets the thinker's encoding of a sound, but not the sound itself.
    is_audio = (prompt_ids == thinker.config.audio_token_index).unsqueeze(-1)
    prompt = torch.where(is_audio, hidden_states[0][-1], prompt)
    special = torch.tensor([[SPEECH_START, SPEECH_END, SPEECH_PAD]])
    start, end, pad = thinker.get_input_embeddings()(special).split(1, dim=1)
    return {
        "text_ids": torch.cat([prompt_ids, special[:, :1], tokens[:, :1]], dim=1),
        "prompt_embeds": torch.cat([prompt, start, reply[0]], dim=1),
        "reply_embeds": torch.cat([*reply[1:], end, pad], dim=1),
    }


@torch.no_grad()
def _draw_weights(module: torch.nn.Module, gain: float) -> None:
    """Draw every parameter, as the constructor has filled in no values.

    A matrix keeps a signal's size, times `gain`. Biases, exponents and norms get a spread, too,
    instead of 0 or 1, so that all matter to the output.
    """
    generator = torch.Generator().manual_seed(SEED)
    for name, param in module.named_parameters():
        if param.dim() > 1:
            param.normal_(0.0, gain / math.sqrt(param[0].numel()), generator=generator)
        else:
            middle, spread = (1.0, 0.1) if name.endswith(".weight") else (0.0, 0.05)
            param.normal_(middle, spread, generator=generator)
