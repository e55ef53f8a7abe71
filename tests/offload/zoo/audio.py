"""Models of speech, sound and music."""

from typing import Any

import torch

from tests.offload.zoo.entries import Subject, entry
from tests.offload.zoo.inputs import GREEDY, SPECIAL, VOCABULARY, ids

SPEECH: dict[str, Any] = {
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
    **SPECIAL,
}


def _wave(samples: int = 640) -> torch.Tensor:
    return torch.randn(1, samples)


@entry("WhisperForConditionalGeneration", "a generate() of its own; positions never trained")
def whisper() -> Subject:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=50,
            max_target_positions=32,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **SPECIAL,
        )
    )
    return Subject(model, lambda: model.generate(torch.randn(1, 8, 100), **GREEDY))


@entry(
    "SpeechT5ForTextToSpeech",
    "a method that makes a spectrogram; dropout that is always on",
    often=True,
)
def speech_t5() -> Subject:
    from transformers import SpeechT5Config, SpeechT5ForTextToSpeech

    model = SpeechT5ForTextToSpeech(
        SpeechT5Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=48,
            num_mel_bins=8,
            speech_decoder_prenet_units=16,
            speech_decoder_postnet_units=16,
            speech_decoder_postnet_layers=2,
            speaker_embedding_dim=8,
            max_text_positions=32,
            max_speech_positions=64,
            **SPECIAL,
        )
    )
    return Subject(
        model,
        lambda: model.generate_speech(ids(), torch.randn(1, 8), threshold=2.0, maxlenratio=2.0),
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


@entry("VitsModel", "flows, random durations, and a vocoder with weight norm in one")
def vits() -> Subject:
    from transformers import VitsConfig, VitsModel

    model = VitsModel(
        VitsConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            flow_size=16,
            spectrogram_bins=9,
            upsample_initial_channel=16,
            upsample_rates=[2, 2],
            upsample_kernel_sizes=[4, 4],
            resblock_kernel_sizes=[3],
            resblock_dilation_sizes=[[1, 3]],
            prior_encoder_num_flows=2,
            prior_encoder_num_wavenet_layers=2,
            posterior_encoder_num_wavenet_layers=2,
            duration_predictor_num_flows=2,
            duration_predictor_filter_channels=16,
            depth_separable_num_layers=2,
            wavenet_dilation_rate=1,
        )
    )
    return Subject(model, lambda: model(ids()))


@entry("BarkModel", "three generators in turn, and a codec; heads tied to embeddings", often=True)
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


@entry("EncodecModel", "weight norm, an LSTM, codebooks that are buffers", often=True)
def encodec() -> Subject:
    from transformers import EncodecConfig, EncodecModel

    model = EncodecModel(EncodecConfig(**_encodec_sizes()))

    def run() -> object:
        codes = model.encode(torch.randn(1, 1, 160))
        return codes, model.decode(codes.audio_codes, codes.audio_scales)

    return Subject(model, run)


@entry("DacModel", "weight norm; each quantizer's weight is read beside its call", often=True)
def dac() -> Subject:
    from transformers import DacConfig, DacModel

    model = DacModel(
        DacConfig(
            encoder_hidden_size=8,
            downsampling_ratios=[2, 4],
            decoder_hidden_size=32,
            n_codebooks=3,
            codebook_size=16,
            codebook_dim=4,
        )
    )

    def run() -> object:
        encoded = model.encode(torch.randn(1, 1, 160))
        return encoded, model.decode(audio_codes=encoded.audio_codes)

    return Subject(model, run)


@entry("MusicgenForConditionalGeneration", "an encoder, a decoder and a codec in one", often=True)
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
            text_encoder=T5Config(
                vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
            ).to_dict(),
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


@entry("MimiModel", "codebooks made of two buffers; a transformer between convolutions")
def mimi() -> Subject:
    from transformers import MimiConfig, MimiModel

    model = MimiModel(
        MimiConfig(
            num_filters=4,
            hidden_size=16,
            upsampling_ratios=[4, 2],
            num_residual_layers=1,
            codebook_size=16,
            codebook_dim=8,
            vector_quantization_hidden_dimension=8,
            num_quantizers=4,
            num_semantic_quantizers=1,
            upsample_groups=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=32,
            sampling_rate=800,
            frame_rate=50,
        )
    )

    def run() -> object:
        codes = model.encode(torch.randn(1, 1, 160))
        return codes, model.decode(codes.audio_codes)

    return Subject(model, run)


@entry(
    "Wav2Vec2ForPreTraining",
    "weight norm as a parametrization; a codebook that is sampled",
    often=True,
)
def wav2vec2() -> Subject:
    from transformers import Wav2Vec2Config, Wav2Vec2ForPreTraining

    model = Wav2Vec2ForPreTraining(
        Wav2Vec2Config(
            **SPEECH,
            codevector_dim=16,
            num_codevectors_per_group=4,
            num_codevector_groups=2,
            proj_codevector_dim=16,
            mask_time_prob=0.0,
        )
    )
    return Subject(model, lambda: model(_wave()))


@entry("WavLMForCTC", "the first layer's table of positions is used by the others")
def wavlm() -> Subject:
    from transformers import WavLMConfig, WavLMForCTC

    model = WavLMForCTC(WavLMConfig(**SPEECH, mask_time_prob=0.0))
    return Subject(model, lambda: model(_wave()))


@entry("ClapModel", "a Swin with batch norms beside a text model; two methods are its use")
def clap() -> Subject:
    from transformers import ClapConfig, ClapModel

    model = ClapModel(
        ClapConfig(
            text_config={
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 48,
                "max_position_embeddings": 32,
                "projection_dim": 16,
            },
            audio_config={
                "spec_size": 32,
                "num_mel_bins": 8,
                "window_size": 2,
                "patch_size": 4,
                "patch_stride": [4, 4],
                "patch_embeds_hidden_size": 8,
                "depths": [1, 1],
                "num_attention_heads": [2, 2],
                "hidden_size": 16,
                "projection_dim": 16,
                "num_classes": 4,
            },
            projection_dim=16,
        )
    )

    def run() -> object:
        sound = torch.randn(1, 1, 128, 8)
        return model.get_text_features(ids()), model.get_audio_features(sound)

    return Subject(model, run)


@entry("FastSpeech2ConformerWithHifiGan", "batch norms, predicted lengths, and a vocoder")
def fast_speech() -> Subject:
    from transformers import (
        FastSpeech2ConformerConfig,
        FastSpeech2ConformerHifiGanConfig,
        FastSpeech2ConformerWithHifiGan,
        FastSpeech2ConformerWithHifiGanConfig,
    )

    layers = {"encoder_layers": 2, "decoder_layers": 2}
    model = FastSpeech2ConformerWithHifiGan(
        FastSpeech2ConformerWithHifiGanConfig(
            model_config=FastSpeech2ConformerConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                num_mel_bins=8,
                encoder_num_attention_heads=2,
                decoder_num_attention_heads=2,
                encoder_linear_units=32,
                decoder_linear_units=32,
                duration_predictor_channels=16,
                energy_predictor_channels=16,
                pitch_predictor_channels=16,
                speech_decoder_postnet_units=16,
                speech_decoder_postnet_layers=2,
                **layers,
            ).to_dict(),
            vocoder_config=FastSpeech2ConformerHifiGanConfig(
                model_in_dim=8,
                upsample_initial_channel=16,
                upsample_rates=[2, 2],
                upsample_kernel_sizes=[4, 4],
                resblock_kernel_sizes=[3],
                resblock_dilation_sizes=[[1, 3]],
            ).to_dict(),
        )
    )
    return Subject(model, lambda: model(ids()))


@entry("UnivNetModel", "a network that predicts the kernels of another")
def univnet() -> Subject:
    from transformers import UnivNetConfig, UnivNetModel

    model = UnivNetModel(
        UnivNetConfig(
            model_in_channels=4,
            model_hidden_channels=4,
            num_mel_bins=8,
            resblock_kernel_sizes=[3],
            resblock_stride_sizes=[2],
            resblock_dilation_sizes=[[1, 3]],
            kernel_predictor_num_blocks=1,
            kernel_predictor_hidden_channels=4,
        )
    )
    model.apply_weight_norm()
    return Subject(model, lambda: model(torch.randn(1, 6, 8), torch.randn(1, 6, 4)))


@entry("MoshiForConditionalGeneration", "layers whose weights are chosen by the codebook")
def moshi() -> Subject:
    from transformers import MimiConfig, MoshiConfig, MoshiForConditionalGeneration

    model = MoshiForConditionalGeneration(
        MoshiConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            ffn_dim=48,
            max_position_embeddings=64,
            audio_vocab_size=16,
            num_codebooks=4,
            audio_encoder_config=MimiConfig(
                num_filters=4,
                hidden_size=16,
                upsampling_ratios=[4, 2],
                num_residual_layers=1,
                codebook_size=16,
                codebook_dim=8,
                vector_quantization_hidden_dimension=8,
                num_quantizers=4,
                upsample_groups=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=8,
                intermediate_size=32,
                sampling_rate=800,
                frame_rate=50,
            ).to_dict(),
            depth_decoder_config={
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "ffn_dim": 32,
                "num_codebooks": 4,
                "audio_vocab_size": 16,
            },
        )
    )

    def run() -> object:
        codes = torch.randint(0, 16, (1, 2, 7))
        said = model(input_ids=ids(), moshi_audio_codes=codes, user_audio_codes=codes)
        deep = model.depth_decoder(
            input_ids=torch.randint(0, 16, (1, 4)), last_hidden_state=torch.randn(1, 1, 32)
        )
        return said, deep

    return Subject(model, run)


@entry("SeamlessM4Tv2ForTextToText", "scaled embeddings under three names, in two halves")
def seamless() -> Subject:
    from transformers import SeamlessM4Tv2Config, SeamlessM4Tv2ForTextToText

    model = SeamlessM4Tv2ForTextToText(
        SeamlessM4Tv2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            decoder_start_token_id=2,
            **SPECIAL,
        )
    )
    return Subject(model, lambda: model.generate(ids()))


@entry("ParakeetForCTC", "a conformer: batch norms, positions that are computed at each call")
def parakeet() -> Subject:
    from transformers import ParakeetCTCConfig, ParakeetForCTC

    model = ParakeetForCTC(
        ParakeetCTCConfig(
            vocab_size=VOCABULARY,
            pad_token_id=0,
            encoder_config={
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 48,
                "conv_kernel_size": 5,
                "subsampling_conv_channels": 8,
                "num_mel_bins": 16,
            },
        )
    )
    return Subject(model, lambda: model(torch.randn(1, 64, 16)))
