"""The reduced configurations of the demo's stages, and their tokens. The rest is as in the full
model."""

from typing import Any

# Token n < 256 is byte n; special tokens follow.
BYTE_TOKENS = 256
_AUDIO_START, _AUDIO_END, _AUDIO, _IMAGE, _VIDEO, _VISION_START, _VISION_END = range(256, 263)
SPEECH_START, SPEECH_END, SPEECH_PAD, _USER, _TEXT_PAD = range(263, 268)
_TEXT_VOCABULARY = 272

_THINKER_WIDTH = 768

#: The talker's tokens from here upwards are special; the vocoder cannot embed them.
CODES = 8193

# Heads are 64 wide: the sections divide 32 rotary frequencies among time, height and width.
_ROPE = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [8, 12, 12]}
_TOKENS = {
    "audio_token_index": _AUDIO,
    "image_token_index": _IMAGE,
    "video_token_index": _VIDEO,
    "audio_start_token_id": _AUDIO_START,
    "audio_end_token_id": _AUDIO_END,
    # The thinker's configuration class does not declare this, but the model reads it.
    "vision_start_token_id": _VISION_START,
}

#: By stage: the class in transformers, and its configuration.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "thinker": (
        "Qwen2_5OmniThinkerForConditionalGeneration",
        {
            "audio_config": {
                "d_model": 384,
                "encoder_layers": 3,
                "encoder_attention_heads": 6,
                "encoder_ffn_dim": 1536,
                "output_dim": _THINKER_WIDTH,
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_heads": 4,
                "out_hidden_size": _THINKER_WIDTH,
                "fullatt_block_indexes": [1],
            },
            "text_config": {
                "vocab_size": _TEXT_VOCABULARY,
                "hidden_size": _THINKER_WIDTH,
                "intermediate_size": 2048,
                "num_hidden_layers": 5,
                "num_attention_heads": 12,
                "num_key_value_heads": 2,
                "rope_parameters": dict(_ROPE),
                "tie_word_embeddings": False,
                "pad_token_id": _TEXT_PAD,
            },
            "user_token_id": _USER,
            **_TOKENS,
        },
    ),
    "talker": (
        "Qwen2_5OmniTalkerForConditionalGeneration",
        {
            "embedding_size": _THINKER_WIDTH,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 7,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rope_parameters": dict(_ROPE),
            "vision_end_token_id": _VISION_END,
            "tts_text_start_token_id": SPEECH_START,
            "tts_text_end_token_id": SPEECH_END,
            "tts_text_pad_token_id": SPEECH_PAD,
            **_TOKENS,
        },
    ),
    "token2wav": (
        "Qwen2_5OmniToken2WavModel",
        {
            "dit_config": {
                "hidden_size": 384,
                "num_hidden_layers": 8,
                "num_attention_heads": 6,
                "emb_dim": 192,
                "look_ahead_layers": [4],
                "look_backward_layers": [0, 7],
                "enc_emb_dim": 64,
                "enc_dim": 64,
                "enc_channels": [128, 128, 128, 128, 384],
            },
            "bigvgan_config": {"upsample_initial_channel": 256},
        },
    ),
}
