"""Qwen2.5-Omni, whole: text, sound and a picture in, text and sound out."""

from collections.abc import Callable
from typing import Any

import torch

from tests.offload.models.weights import draw

Outputs = dict[str, torch.Tensor]

# Bytes are tokens, and special tokens follow.
AUDIO, IMAGE, VIDEO = 256, 257, 258
AUDIO_START, AUDIO_END, VISION_START, VISION_END = 259, 260, 261, 262
SPEECH_START, SPEECH_END, SPEECH_PAD = 263, 264, 265
USER = 268
VOCABULARY = 288

WIDTH = 256
MEL_BINS = 32
ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 6, 6],
}


def qwen2_5() -> tuple[torch.nn.Module, Callable[[], Outputs]]:
    """A reduced Qwen2.5-Omni with random weights, and a function that runs all of it once."""
    import transformers

    config = transformers.Qwen2_5OmniConfig(
        thinker_config=_thinker_2_5(transformers),
        talker_config=_talker_2_5(transformers),
        token2wav_config=_token2wav_2_5(transformers),
        enable_audio_output=True,
    )
    model: Any = transformers.Qwen2_5OmniForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    draw(model.thinker, 1)
    draw(model.talker, 2)
    draw(model.token2wav.code2wav_dit_model, 3)
    draw(model.token2wav.code2wav_bigvgan_model, 4, gain=0.7)
    generator = torch.Generator().manual_seed(5)
    model.speaker_map["nobody"] = {
        "bos_token": SPEECH_START,
        "cond": torch.randn(1, 16, generator=generator),
        "ref_mel": torch.randn(1, 20, 16, generator=generator),
    }
    asked = _prompt()

    @torch.no_grad()
    def run() -> Outputs:
        torch.manual_seed(6)
        text, sound = model.generate(
            **asked,
            speaker="nobody",
            thinker_max_new_tokens=4,
            thinker_do_sample=False,
            thinker_suppress_tokens=list(range(256, VOCABULARY)),
            thinker_pad_token_id=0,
            talker_max_new_tokens=6,
            talker_do_sample=False,
            talker_repetition_penalty=1.3,
            talker_eos_token_id=[8294],
            token2wav_num_steps=3,
        )
        return {"text": text, "sound": sound}

    return model, run


def _prompt() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = [AUDIO_START, *[AUDIO] * 10, AUDIO_END]
    tokens += [VISION_START, *[IMAGE] * 4, VISION_END, *b"What is it?"]
    return {
        "input_ids": torch.tensor([tokens]),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.long),
        "input_features": torch.randn(1, MEL_BINS, 40, generator=generator),
        "feature_attention_mask": torch.ones(1, 40, dtype=torch.long),
        "thinker_pixel_values": torch.randn(16, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


def _thinker_2_5(transformers: Any) -> Any:
    return transformers.Qwen2_5OmniThinkerConfig(
        audio_config={
            "num_mel_bins": MEL_BINS,
            "d_model": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 512,
            "output_dim": WIDTH,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [1],
        },
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 1024,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "rope_parameters": dict(ROPE),
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        },
        audio_token_index=AUDIO,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_start_token_id=AUDIO_START,
        audio_end_token_id=AUDIO_END,
        user_token_id=USER,
        vision_start_token_id=VISION_START,
    )


def _talker_2_5(transformers: Any) -> Any:
    return transformers.Qwen2_5OmniTalkerConfig(
        vocab_size=8448,
        embedding_size=WIDTH,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters=dict(ROPE),
        audio_token_index=AUDIO,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_start_token_id=AUDIO_START,
        audio_end_token_id=AUDIO_END,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tts_text_start_token_id=SPEECH_START,
        tts_text_end_token_id=SPEECH_END,
        tts_text_pad_token_id=SPEECH_PAD,
        tts_codec_pad_token_id=8292,
        tts_codec_start_token_id=8293,
        tts_codec_end_token_id=8294,
        tts_codec_mask_token_id=8296,
    )


def _token2wav_2_5(transformers: Any) -> Any:
    return transformers.Qwen2_5OmniToken2WavConfig(
        dit_config={
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "head_dim": 32,
            "emb_dim": 64,
            "num_embeds": 8448,
            "mel_dim": 16,
            "look_ahead_layers": [2],
            "look_backward_layers": [0, 3],
            "enc_emb_dim": 16,
            "enc_dim": 16,
            "enc_channels": [32, 32, 32, 32, 96],
        },
        bigvgan_config={"mel_dim": 16, "upsample_initial_channel": 128},
    )
