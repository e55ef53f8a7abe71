"""Models of speech, sound and music."""

from functools import partial
from typing import Any

import torch

from tests.offload.zoo.entries import Subject, entry, of_transformers
from tests.offload.zoo.inputs import CODEC, GREEDY, SPECIAL, T5, VOCABULARY, ids

add = partial(of_transformers, "audio")

add(
    "WhisperForConditionalGeneration",
    "a generate() of its own; positions never trained",
    lambda model: model.generate(torch.randn(1, 8, 100), **GREEDY),
    {
        "vocab_size": VOCABULARY,
        "num_mel_bins": 8,
        "d_model": 32,
        **CODEC,
        "max_source_positions": 50,
        "max_target_positions": 32,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        **SPECIAL,
    },
)
add(
    "SpeechT5ForTextToSpeech",
    "a method that makes a spectrogram; dropout that is always on",
    lambda model: model.generate_speech(ids(), torch.randn(1, 8), threshold=2.0, maxlenratio=2.0),
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        **CODEC,
        "num_mel_bins": 8,
        "speech_decoder_prenet_units": 16,
        "speech_decoder_postnet_units": 16,
        "speech_decoder_postnet_layers": 2,
        "speaker_embedding_dim": 8,
        "max_text_positions": 32,
        "max_speech_positions": 64,
        **SPECIAL,
    },
)


@entry("SpeechT5HifiGan", "a vocoder whose weight norm is put on and taken off", often=True)
def hifi_gan() -> Subject:
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    model = SpeechT5HifiGan(
        SpeechT5HifiGanConfig(
            model_in_dim=8,
            upsample_initial_channel=16,
            upsample_rates=[2, 2],
            upsample_kernel_sizes=[4, 4],
            resblock_kernel_sizes=[3],
            resblock_dilation_sizes=[[1, 3]],
        )
    )
    model.apply_weight_norm()
    return Subject(model, lambda: model(torch.randn(6, 8)))


@entry("BarkModel", "three generators in turn, and a codec; heads tied to embeddings")
def bark() -> Subject:
    from transformers import BarkConfig, BarkModel
    from transformers.models.bark.generation_configuration_bark import (
        BarkCoarseGenerationConfig,
        BarkFineGenerationConfig,
        BarkGenerationConfig,
        BarkSemanticGenerationConfig,
    )

    size = {"num_layers": 2, "num_heads": 2, "hidden_size": 16, "block_size": 64}
    model = BarkModel(
        BarkConfig(
            semantic_config={**size, "input_vocab_size": 80, "output_vocab_size": 80},
            coarse_acoustics_config={**size, "input_vocab_size": 64, "output_vocab_size": 64},
            fine_acoustics_config={
                **size,
                "input_vocab_size": 17,
                "output_vocab_size": 17,
                "n_codes_total": 4,
                "n_codes_given": 1,
            },
            codec_config=_encodec_sizes(codebooks=4),
        )
    )
    semantic = BarkSemanticGenerationConfig(
        max_new_tokens=16,
        text_encoding_offset=0,
        text_pad_token=9,
        semantic_infer_token=10,
        semantic_vocab_size=16,
        semantic_pad_token=16,
        max_input_semantic_length=8,
        eos_token_id=16,
    )
    coarse = BarkCoarseGenerationConfig(
        coarse_semantic_pad_token=17,
        coarse_infer_token=63,
        coarse_rate_hz=4,
        semantic_rate_hz=4,
        max_coarse_input_length=8,
        max_coarse_history=8,
        sliding_window_len=4,
    )
    fine = BarkFineGenerationConfig(
        max_fine_history_length=4, max_fine_input_length=8, n_fine_codebooks=4
    )
    model.generation_config = BarkGenerationConfig(codebook_size=16)
    model.generation_config.semantic_config = semantic.to_dict()
    model.generation_config.coarse_acoustics_config = coarse.to_dict()
    model.generation_config.fine_acoustics_config = fine.to_dict()
    return Subject(model, lambda: model.generate(ids(8)))


def _encodec_sizes(codebooks: int = 2) -> dict[str, Any]:
    return {
        "num_filters": 4,
        "hidden_size": 16,
        "codebook_dim": 16,
        "codebook_size": 16,
        "upsampling_ratios": [4, 2],
        "num_residual_layers": 1,
        "num_lstm_layers": 1,
        "sampling_rate": 800,
        "target_bandwidths": [0.4 * codebooks],
        "use_causal_conv": True,
    }


def _run_codec(model: Any) -> object:
    codes = model.encode(torch.randn(1, 1, 160))
    return codes, model.decode(audio_codes=codes.audio_codes, audio_scales=codes.audio_scales)


def _run_dac(model: Any) -> object:
    encoded = model.encode(torch.randn(1, 1, 160))
    return encoded, model.decode(audio_codes=encoded.audio_codes)


add(
    "EncodecModel",
    "weight norm, an LSTM, codebooks that are buffers",
    _run_codec,
    _encodec_sizes(),
)
add(
    "DacModel",
    "weight norm; each quantizer's weight is read beside its call",
    _run_dac,
    {
        "encoder_hidden_size": 8,
        "downsampling_ratios": [2, 4],
        "decoder_hidden_size": 32,
        "n_codebooks": 3,
        "codebook_size": 16,
        "codebook_dim": 4,
    },
)


@entry("MusicgenForConditionalGeneration", "an encoder, a decoder and a codec in one")
def musicgen() -> Subject:
    from transformers import (
        EncodecConfig,
        MusicgenConfig,
        MusicgenDecoderConfig,
        MusicgenForConditionalGeneration,
        T5Config,
    )

    model = MusicgenForConditionalGeneration(
        MusicgenConfig(
            text_encoder=T5Config(**T5).to_dict(),
            audio_encoder=EncodecConfig(**_encodec_sizes()).to_dict(),
            decoder=MusicgenDecoderConfig(
                vocab_size=16,
                num_codebooks=2,
                hidden_size=32,
                ffn_dim=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=64,
                pad_token_id=16,
                bos_token_id=16,
            ).to_dict(),
        )
    )
    model.generation_config.decoder_start_token_id = 16
    model.generation_config.pad_token_id = 16

    def run() -> object:
        return model.generate(ids(), max_new_tokens=6, do_sample=True, guidance_scale=2.0)

    return Subject(model, run)


add(
    "Wav2Vec2ForPreTraining",
    "weight norm as a parametrization; a codebook that is sampled",
    lambda model: model(torch.randn(1, 640)),
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "conv_dim": (16, 16),
        "conv_kernel": (8, 3),
        "conv_stride": (5, 2),
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "codevector_dim": 16,
        "num_codevectors_per_group": 4,
        "num_codevector_groups": 2,
        "proj_codevector_dim": 16,
        "mask_time_prob": 0.0,
        **SPECIAL,
    },
)
add(
    "SeamlessM4Tv2ForTextToText",
    "scaled embeddings under three names, in two halves",
    lambda model: model.generate(ids()),
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        **CODEC,
        "max_position_embeddings": 64,
        "decoder_start_token_id": 2,
        **SPECIAL,
    },
)
