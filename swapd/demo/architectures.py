"""The reduced configurations of the demo's stages, and their tokens."""

from collections.abc import Callable
from typing import Any

# Token n < 256 is byte n; special tokens follow.
BYTE_TOKENS = 256
AUDIO_START = 256
AUDIO_END = 257
AUDIO = 258
IMAGE = 259
VIDEO = 260
VISION_START = 261
VISION_END = 262
SPEECH_START = 263
SPEECH_END = 264
SPEECH_PAD = 265
USER = 266
TEXT_PAD = 267
TEXT_VOCABULARY = 272

THINKER_WIDTH = 768
MEL_BINS = 128

# As in the full model. Tokens from CODES upwards are special; the vocoder cannot embed them.
CODES = 8193
CODEC_VOCABULARY = 8448
CODEC_PAD = 8292
CODEC_START = 8293
CODEC_END = 8294
CODEC_MASK = 8296

WAVE_MEL_BINS = 80
VOICE_WIDTH = 64
VOICE_FRAMES = 100

# Heads are 64 wide: the sections divide 32 rotary frequencies among time, height and width.
_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1000000.0,
    "mrope_section": [8, 12, 12],
}


def _thinker(transformers: Any) -> tuple[Any, Any]:
    audio = transformers.Qwen2_5OmniAudioEncoderConfig(
        num_mel_bins=MEL_BINS,
        d_model=384,
        encoder_layers=3,
        encoder_attention_heads=6,
        encoder_ffn_dim=1536,
        output_dim=THINKER_WIDTH,
    )
    vision = transformers.Qwen2_5OmniVisionEncoderConfig(
        depth=2,
        hidden_size=128,
        intermediate_size=256,
        num_heads=4,
        out_hidden_size=THINKER_WIDTH,
        fullatt_block_indexes=[1],
    )
    text = transformers.Qwen2_5OmniTextConfig(
        vocab_size=TEXT_VOCABULARY,
        hidden_size=THINKER_WIDTH,
        intermediate_size=2048,
        num_hidden_layers=5,
        num_attention_heads=12,
        num_key_value_heads=2,
        rope_parameters=dict(_ROPE),
        tie_word_embeddings=False,
        pad_token_id=TEXT_PAD,
    )
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config=audio,
        vision_config=vision,
        text_config=text,
        audio_token_index=AUDIO,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_start_token_id=AUDIO_START,
        audio_end_token_id=AUDIO_END,
        user_token_id=USER,
        # The configuration class does not declare this, but the model reads it.
        vision_start_token_id=VISION_START,
    )
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration, config


def _talker(transformers: Any) -> tuple[Any, Any]:
    config = transformers.Qwen2_5OmniTalkerConfig(
        vocab_size=CODEC_VOCABULARY,
        embedding_size=THINKER_WIDTH,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        rope_parameters=dict(_ROPE),
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
        tts_codec_pad_token_id=CODEC_PAD,
        tts_codec_start_token_id=CODEC_START,
        tts_codec_end_token_id=CODEC_END,
        tts_codec_mask_token_id=CODEC_MASK,
    )
    return transformers.Qwen2_5OmniTalkerForConditionalGeneration, config


def _token2wav(transformers: Any) -> tuple[Any, Any]:
    dit = transformers.Qwen2_5OmniDiTConfig(
        hidden_size=384,
        num_hidden_layers=8,
        num_attention_heads=6,
        head_dim=64,
        emb_dim=192,
        num_embeds=CODES,
        mel_dim=WAVE_MEL_BINS,
        look_ahead_layers=[4],
        look_backward_layers=[0, 7],
        enc_emb_dim=VOICE_WIDTH,
        enc_dim=64,
        enc_channels=[128, 128, 128, 128, 384],
    )
    bigvgan = transformers.Qwen2_5OmniBigVGANConfig(
        mel_dim=WAVE_MEL_BINS, upsample_initial_channel=256
    )
    config = transformers.Qwen2_5OmniToken2WavConfig(dit_config=dit, bigvgan_config=bigvgan)
    return transformers.Qwen2_5OmniToken2WavModel, config


# By stage: returns the class and the reduced configuration.
ARCHITECTURES: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "thinker": _thinker,
    "talker": _talker,
    "token2wav": _token2wav,
}
