"""Models of text and pictures, text and sound, or all of these."""

from typing import Any

import torch

from tests.offload.zoo.entries import Subject, entry
from tests.offload.zoo.inputs import GREEDY, SMALL, SPECIAL, VOCABULARY, ids, picture

#: A vision tower: 16 patches.
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
TEXT: dict[str, Any] = {**SMALL, "max_position_embeddings": 64}
PICTURE = 7  # the token that stands for a patch


def _with_patches(patches: int) -> torch.Tensor:
    return torch.cat([ids(2), torch.full((1, patches), PICTURE), ids(3)], dim=1)


@entry("CLIPModel", "two towers, used by methods; a lone parameter scales their outputs")
def clip() -> Subject:
    from transformers import CLIPConfig, CLIPModel

    model = CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16))

    def run() -> object:
        text, image = model.get_text_features(ids()), model.get_image_features(picture())
        return text, image, model(ids(), picture())

    return Subject(model, run)


@entry("SiglipModel", "a MultiheadAttention whose probe is a parameter")
def siglip() -> Subject:
    from transformers import SiglipConfig, SiglipModel

    model = SiglipModel(SiglipConfig(text_config=TEXT, vision_config=VISION))
    return Subject(model, lambda: model(ids(), picture()))


@entry("CLIPSegForImageSegmentation", "a decoder that reads states of a tower's layers")
def clipseg() -> Subject:
    from transformers import CLIPSegConfig, CLIPSegForImageSegmentation

    model = CLIPSegForImageSegmentation(
        CLIPSegConfig(
            text_config=TEXT,
            vision_config={**VISION, "num_hidden_layers": 3},
            projection_dim=16,
            extract_layers=[0, 1, 2],
            reduce_dim=8,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=16,
            conditional_layer=0,
        )
    )
    return Subject(model, lambda: model(ids(), picture()))


@entry("GroundingDinoForObjectDetection", "text and picture attend to each other; shared heads")
def grounding_dino() -> Subject:
    from transformers import (
        BertConfig,
        GroundingDinoConfig,
        GroundingDinoForObjectDetection,
        SwinConfig,
    )

    model = GroundingDinoForObjectDetection(
        GroundingDinoConfig(
            backbone_config=SwinConfig(
                image_size=64,
                patch_size=4,
                embed_dim=8,
                depths=[1, 1, 1, 1],
                num_heads=[1, 1, 2, 2],
                window_size=2,
                out_indices=[2, 3, 4],
            ),
            text_config=BertConfig(**TEXT),
            d_model=32,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            encoder_n_points=2,
            decoder_n_points=2,
            num_queries=5,
            max_text_len=16,
        )
    )
    return Subject(model, lambda: model(picture(128), ids()))


@entry("BlipForConditionalGeneration", "a decoder of text that generates by its own method")
def blip() -> Subject:
    from transformers import BlipConfig, BlipForConditionalGeneration

    model = BlipForConditionalGeneration(
        BlipConfig(
            text_config={**TEXT, "sep_token_id": 2, "encoder_hidden_size": 32},
            vision_config=VISION,
            projection_dim=16,
        )
    )
    return Subject(model, lambda: model.generate(picture(), max_new_tokens=4))


@entry("Blip2ForConditionalGeneration", "query tokens that are a parameter, expanded; three models")
def blip2() -> Subject:
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    model = Blip2ForConditionalGeneration(
        Blip2Config(
            vision_config=VISION,
            qformer_config={**TEXT, "encoder_hidden_size": 32},
            text_config={
                "model_type": "opt",
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "word_embed_proj_dim": 32,
                "ffn_dim": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 64,
                **SPECIAL,
            },
            num_query_tokens=4,
            image_token_index=PICTURE,
        )
    )
    return Subject(model, lambda: model.generate(picture(), input_ids=_with_patches(4), **GREEDY))


def _llama() -> dict[str, Any]:
    return {"model_type": "llama", **TEXT, "num_key_value_heads": 2}


@entry("LlavaForConditionalGeneration", "a tower, a projector and a language model", often=True)
def llava() -> Subject:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config={"model_type": "clip_vision_model", **VISION},
            text_config=_llama(),
            image_token_index=PICTURE,
            image_token_id=PICTURE,
            vision_feature_layer=-1,
        )
    )
    return Subject(
        model,
        lambda: model.generate(_with_patches(16), pixel_values=picture(), **GREEDY),
    )


@entry("Gemma3ForConditionalGeneration", "scaled embeddings; local and global layers; a tower")
def gemma3() -> Subject:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    model = Gemma3ForConditionalGeneration(
        Gemma3Config(
            vision_config=VISION,
            text_config={
                **TEXT,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            mm_tokens_per_image=4,
            image_token_id=PICTURE,
            image_token_index=PICTURE,
        )
    )

    def run() -> object:
        tokens = _with_patches(4)
        types = (tokens == PICTURE).long()
        return model.generate(tokens, pixel_values=picture(), token_type_ids=types, **GREEDY)

    return Subject(model, run)


@entry(
    "Qwen2VLForConditionalGeneration", "positions in three dimensions; pictures as lists of patches"
)
def qwen2_vl() -> Subject:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    model = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config={
                **TEXT,
                "num_key_value_heads": 2,
                "rope_parameters": {
                    "rope_type": "default",
                    "mrope_section": [2, 1, 1],
                    "rope_theta": 10000.0,
                },
            },
            vision_config={
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 8,
            },
            image_token_id=PICTURE,
            vision_start_token_id=4,
            vision_end_token_id=5,
        )
    )

    def run() -> object:
        patches = torch.randn(16, 3 * 2 * 8 * 8)
        tokens = _with_patches(4)
        return model.generate(
            tokens,
            pixel_values=patches,
            image_grid_thw=torch.tensor([[1, 4, 4]]),
            mm_token_type_ids=(tokens == PICTURE).int(),
            **GREEDY,
        )

    return Subject(model, run)


@entry("MllamaForConditionalGeneration", "layers that attend to pictures among those of text")
def mllama() -> Subject:
    from transformers import MllamaConfig, MllamaForConditionalGeneration

    model = MllamaForConditionalGeneration(
        MllamaConfig(
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 4,
                "image_size": 32,
                "patch_size": 8,
                "max_num_tiles": 2,
                "intermediate_layers_indices": [0],
                "vision_output_dim": 64,
                "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
            },
            text_config={
                **TEXT,
                "num_hidden_layers": 3,
                "num_key_value_heads": 2,
                "cross_attention_layers": [1],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            image_token_index=PICTURE,
        )
    )

    def run() -> object:
        return model(
            _with_patches(1),
            pixel_values=torch.randn(1, 1, 2, 3, 32, 32),
            aspect_ratio_ids=torch.tensor([[2]]),
            aspect_ratio_mask=torch.ones(1, 1, 2, dtype=torch.int64),
            cross_attention_mask=torch.ones(1, 6, 1, 2, dtype=torch.int64),
        )

    return Subject(model, run)


@entry("Florence2ForConditionalGeneration", "a tower of windows and channels before a BART")
def florence2() -> Subject:
    from transformers import Florence2Config, Florence2ForConditionalGeneration

    model = Florence2ForConditionalGeneration(
        Florence2Config(
            vision_config={
                "embed_dim": (8, 16),
                "depths": (1, 1),
                "num_heads": (2, 2),
                "num_groups": (2, 2),
                "patch_size": (7, 3),
                "patch_stride": (4, 2),
                "patch_padding": (3, 1),
                "patch_prenorm": (False, True),
                "window_size": 4,
                "projection_dim": 32,
                "max_temporal_embeddings": 4,
                "max_position_embeddings": 8,
            },
            text_config={
                "model_type": "bart",
                "vocab_size": VOCABULARY,
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
                "decoder_ffn_dim": 48,
                "max_position_embeddings": 64,
                "decoder_start_token_id": 2,
                **SPECIAL,
            },
            image_token_id=PICTURE,
        )
    )
    return Subject(
        model, lambda: model.generate(_with_patches(17), pixel_values=picture(), **GREEDY)
    )


@entry("FlavaModel", "three encoders of three lengths, and a codebook")
def flava() -> Subject:
    from transformers import FlavaConfig, FlavaModel

    model = FlavaModel(
        FlavaConfig(
            text_config=TEXT,
            image_config=VISION,
            multimodal_config={k: v for k, v in VISION.items() if "_size" not in k[:6]},
            hidden_size=32,
            projection_dim=16,
        )
    )
    return Subject(model, lambda: model(ids(), picture()))


@entry("Kosmos2ForConditionalGeneration", "latent queries; sines made again for longer texts")
def kosmos2() -> Subject:
    from transformers import Kosmos2Config, Kosmos2ForConditionalGeneration

    model = Kosmos2ForConditionalGeneration(
        Kosmos2Config(
            text_config={
                "vocab_size": VOCABULARY,
                "embed_dim": 32,
                "layers": 2,
                "attention_heads": 4,
                "ffn_dim": 48,
                "max_position_embeddings": 8,
                **SPECIAL,
            },
            vision_config=VISION,
            latent_query_num=4,
        )
    )

    def run() -> object:
        tokens = _with_patches(4)
        return model.generate(
            pixel_values=picture(),
            input_ids=tokens,
            image_embeds_position_mask=(tokens == PICTURE).long(),
            **GREEDY,
        )

    return Subject(model, run)


@entry("LayoutLMv3Model", "biases of positions in two dimensions, summed in the encoder")
def layoutlm() -> Subject:
    from transformers import LayoutLMv3Config, LayoutLMv3Model

    model = LayoutLMv3Model(
        LayoutLMv3Config(
            **TEXT,
            max_2d_position_embeddings=64,
            coordinate_size=4,
            shape_size=8,
            input_size=32,
            patch_size=8,
        )
    )
    return Subject(
        model,
        lambda: model(
            ids(), bbox=torch.randint(0, 30, (1, 7, 4)).sort(-1)[0], pixel_values=picture()
        ),
    )


@entry(
    "UdopForConditionalGeneration",
    "biases that layers share, in a list; an embedding three times",
    often=True,
)
def udop() -> Subject:
    from transformers import UdopConfig, UdopForConditionalGeneration

    model = UdopForConditionalGeneration(
        UdopConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            image_size=32,
            patch_size=8,
            max_2d_position_embeddings=64,
            decoder_start_token_id=0,
        )
    )
    return Subject(
        model,
        lambda: model(
            ids(),
            bbox=torch.rand(1, 7, 4).sort(-1)[0],
            pixel_values=picture(),
            decoder_input_ids=ids(3),
        ),
    )


@entry(
    "ChameleonForConditionalGeneration", "a codec of pictures whose codes become tokens", often=True
)
def chameleon() -> Subject:
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    names = {f"IMGIMG{chr(65 + n)}Z": 8 + n for n in range(10)}
    model = ChameleonForConditionalGeneration(
        ChameleonConfig(
            **TEXT,
            num_key_value_heads=2,
            vq_config={
                "embed_dim": 8,
                "num_embeddings": 10,
                "latent_channels": 8,
                "resolution": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
            },
            vocabulary_map={"<image>": PICTURE, **names},
        )
    )

    def run() -> object:
        tokens = torch.cat([ids(2), torch.full((1, 256), PICTURE), ids(3)], dim=1)
        return model.get_image_features(picture()), model(tokens, pixel_values=picture())

    return Subject(model, run)


@entry("VisionEncoderDecoderModel", "a tower and a decoder of other classes; generate()")
def vision_encoder_decoder() -> Subject:
    from transformers import (
        BertConfig,
        VisionEncoderDecoderConfig,
        VisionEncoderDecoderModel,
        ViTConfig,
    )

    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(**VISION), BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    )
    model = VisionEncoderDecoderModel(config)
    return Subject(
        model,
        lambda: model.generate(picture(), decoder_start_token_id=1, pad_token_id=0, **GREEDY),
    )


@entry(
    "BridgeTowerModel",
    "calls the layers of its two models by itself, one by one",
)
def bridge_tower() -> Subject:
    from transformers import BridgeTowerConfig, BridgeTowerModel

    model = BridgeTowerModel(
        BridgeTowerConfig(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            text_config={**TEXT, "num_hidden_layers": 3, "hidden_size": 64},
            vision_config={
                "hidden_size": 64,
                "num_hidden_layers": 3,
                "patch_size": 8,
                "image_size": 32,
            },
        )
    )
    return Subject(model, lambda: model(ids(), pixel_values=picture()))
