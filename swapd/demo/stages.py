"""Three models in the shape of Qwen2.5-Omni: thinker, talker and token2wav.

Each stage is the architecture of the transformers package with a reduced configuration and weights
drawn from a seed, so nothing is downloaded. The untrained output is noise, but it depends on every
layer that runs, so it shows whether a stage ran with its own weights. The vision tower does not
run, nor do embeddings of tokens that do not occur.

Each process builds one stage and passes dicts of CPU tensors on. Runs draw no entropy and use one
thread, so equal inputs give bit-identical outputs on one kind of machine. Weights are never
written.
"""

from __future__ import annotations

import hashlib
import math
import os
import wave
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from swapd.demo.architectures import (
    ARCHITECTURES,
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    BYTE_TOKENS,
    CODEC_MASK,
    CODEC_PAD,
    CODEC_START,
    CODEC_VOCABULARY,
    CODES,
    MEL_BINS,
    SPEECH_END,
    SPEECH_PAD,
    SPEECH_START,
    TEXT_PAD,
    TEXT_VOCABULARY,
    VOICE_FRAMES,
    VOICE_WIDTH,
    WAVE_MEL_BINS,
)

STAGES = ("thinker", "talker", "token2wav")

THINKER_TOKENS = 12
TALKER_TOKENS = 24
# Points on the sampler's time axis. Each interval costs four evaluations of the diffusion model.
DIFFUSION_POINTS = 4

SOUND_RATE = 16000
WAVE_RATE = 24000

Tensors = dict[str, torch.Tensor]


def build(stage: str, seed: int) -> torch.nn.Module:
    """Build one stage, in eval mode. Equal arguments give bit-identical weights."""
    import transformers  # takes seconds, and write_wav does not need it
    from transformers.initialization import no_init_weights

    # First import all: a module imported under `no_init_weights` may keep its stubs for good.
    architecture, config = ARCHITECTURES[stage](transformers)
    with _single_thread(), no_init_weights():  # drawing them twice would double the time
        module: torch.nn.Module = architecture(config)
        generator = torch.Generator().manual_seed(_number(f"weights/{stage}/{seed}"))
        for part, gain in _parts(stage, module):
            _draw_weights(part, generator, gain)
    return module.eval().requires_grad_(requires_grad=False)


def generate_sound(seed: int) -> torch.Tensor:
    """Return a second of a sine sweep with some hiss: mono float32 samples at SOUND_RATE."""
    generator = torch.Generator().manual_seed(_number(f"sound/{seed}"))
    with _single_thread():
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
    extractor = transformers.WhisperFeatureExtractor(feature_size=MEL_BINS)
    with _single_thread():
        features = extractor(
            sound.numpy(), sampling_rate=SOUND_RATE, padding=False, return_tensors="pt"
        )["input_features"]  # (1, MEL_BINS, frames), log-mel
        # The audio tower halves the frames twice, and rounds differently each time.
        audio_tokens = ((features.shape[-1] - 1) // 2 + 1) // 2
        prompt_ids = torch.tensor([[AUDIO_START, *[AUDIO] * audio_tokens, AUDIO_END, *prompt]])
        result = thinker.generate(
            input_ids=prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            input_features=features,
            feature_attention_mask=torch.ones(features.shape[0], features.shape[2]).long(),
            max_new_tokens=THINKER_TOKENS,
            do_sample=False,
            # Bytes only: untrained weights would also answer with placeholders for sounds.
            suppress_tokens=list(range(BYTE_TOKENS, TEXT_VOCABULARY)),
            pad_token_id=TEXT_PAD,
            output_hidden_states=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = result.sequences[:, prompt_ids.shape[1] :].clone()
        wiring = _talker_inputs(thinker, prompt_ids, tokens, result.hidden_states)
    return {"tokens": tokens, "logits": _winning_logits(result, tokens), **wiring}


@torch.no_grad()
def run_talker(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """Speak the thinker's reply: return "codes", the vocoder's codec tokens.

    "logits" holds the winning logit of each, as in `run_thinker`.
    """
    talker: Any = module
    text_ids = inputs["text_ids"]
    codec_ids = torch.full_like(text_ids, CODEC_MASK)
    codec_ids[:, -2] = CODEC_PAD
    codec_ids[:, -1] = CODEC_START
    with _single_thread():
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
            suppress_tokens=list(range(CODES, CODEC_VOCABULARY)),
            pad_token_id=CODEC_PAD,
            output_logits=True,
            return_dict_in_generate=True,
        )
    codes = result.sequences[:, codec_ids.shape[1] :].clone()
    return {"codes": codes, "logits": _winning_logits(result, codes)}


@torch.no_grad()
def run_token2wav(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """Turn codec tokens into sound: return "waveform", float32 samples at WAVE_RATE."""
    token2wav: Any = module
    # The full model would load a speaker from a file.
    speaker = torch.Generator().manual_seed(_number("voice/0"))
    # The sampler's noise is from the global generator, whose state is the caller's.
    with _single_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(_number("diffusion noise"))
        waveform = token2wav(
            inputs["codes"],
            conditioning=torch.randn(1, VOICE_WIDTH, generator=speaker),
            reference_mel=torch.randn(1, VOICE_FRAMES, WAVE_MEL_BINS, generator=speaker),
            num_steps=DIFFUSION_POINTS,
        )
    return {"waveform": waveform.reshape(-1).clone()}


def write_wav(path: str | os.PathLike[str], waveform: torch.Tensor) -> None:
    samples = (waveform.detach().reshape(-1).clamp(-1.0, 1.0) * 32767).round()
    with wave.open(os.fspath(path), "wb") as out:
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
    is_audio = (prompt_ids == AUDIO).unsqueeze(-1)
    prompt = torch.where(is_audio, hidden_states[0][-1], prompt)
    special = torch.tensor([[SPEECH_START, SPEECH_END, SPEECH_PAD]])
    start, end, pad = thinker.get_input_embeddings()(special).split(1, dim=1)
    return {
        "text_ids": torch.cat([prompt_ids, special[:, :1], tokens[:, :1]], dim=1),
        "prompt_embeds": torch.cat([prompt, start, reply[0]], dim=1),
        "reply_embeds": torch.cat([*reply[1:], end, pad], dim=1),
    }


def _parts(stage: str, module: torch.nn.Module) -> list[tuple[torch.nn.Module, float]]:
    if stage != "token2wav":
        return [(module, 1.0)]
    # The vocoder has no norms between its residual blocks. At a gain of 1 its signal grows until
    # the clamp at its end flattens it; at 0.5 the sound is hardly audible.
    return [
        (module.get_submodule("code2wav_dit_model"), 1.0),
        (module.get_submodule("code2wav_bigvgan_model"), 0.7),
    ]


@torch.no_grad()
def _draw_weights(part: torch.nn.Module, generator: torch.Generator, gain: float) -> None:
    """Draw every parameter, as the constructor has filled in no values.

    Biases, exponents and norms get a spread, too, instead of 0 or 1, so that all matter to the
    output.
    """
    for module in part.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.dim() > 1:
                std = 1.0 if isinstance(module, torch.nn.Embedding) else _std(module, param)
                param.normal_(0.0, std * gain, generator=generator)
            elif name == "weight":
                param.normal_(1.0, 0.1, generator=generator)
            else:
                param.normal_(0.0, 0.05, generator=generator)


def _std(module: torch.nn.Module, weight: torch.Tensor) -> float:
    """Return the spread that keeps a signal's size through the weight."""
    if isinstance(module, torch.nn.ConvTranspose1d):
        taps = module.kernel_size[0] / module.stride[0]
        return 1.0 / math.sqrt(module.in_channels * taps)
    return 1.0 / math.sqrt(weight[0].numel())


def _number(label: str) -> int:
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:7], "big")


@contextmanager
def _single_thread() -> Iterator[None]:
    """Compute on one thread, since the number of threads decides the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
