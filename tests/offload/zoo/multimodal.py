"""Models of text and pictures, text and sound, or all of these."""

from functools import partial
from typing import Any

import torch

from tests.offload.zoo.entries import of_transformers
from tests.offload.zoo.inputs import GREEDY, SMALL, SPECIAL, T5, VISION, VOCABULARY, ids, picture

add = partial(of_transformers, "multimodal")

TEXT: dict[str, Any] = {**SMALL, "max_position_embeddings": 64}
PICTURE = 7  # the token that stands for a patch


def _with_patches(patches: int) -> torch.Tensor:
    return torch.cat([ids(2), torch.full((1, patches), PICTURE), ids(3)], dim=1)


def _run_clip(model: Any) -> object:
    text, image = model.get_text_features(ids()), model.get_image_features(picture())
    return text, image, model(ids(), picture())


def _run_udop(model: Any) -> object:
    return model(
        ids(),
        bbox=torch.rand(1, 7, 4).sort(-1)[0],
        pixel_values=picture(),
        decoder_input_ids=ids(3),
    )


def _run_chameleon(model: Any) -> object:
    return model.get_image_features(picture()), model(_with_patches(256), pixel_values=picture())


add(
    "CLIPModel",
    "two towers, used by methods; a lone parameter scales their outputs",
    _run_clip,
    {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16},
)
add(
    "CLIPSegForImageSegmentation",
    "a decoder that reads states of a tower's layers",
    lambda model: model(ids(), picture()),
    {
        "text_config": TEXT,
        "vision_config": {**VISION, "num_hidden_layers": 3},
        "projection_dim": 16,
        "extract_layers": [0, 1, 2],
        "reduce_dim": 8,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 16,
        "conditional_layer": 0,
    },
)
add(
    "Blip2ForConditionalGeneration",
    "query tokens that are a parameter, expanded; three models",
    lambda model: model.generate(picture(), input_ids=_with_patches(4), **GREEDY),
    {
        "vision_config": VISION,
        "qformer_config": {**TEXT, "encoder_hidden_size": 32},
        "text_config": {
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
        "num_query_tokens": 4,
        "image_token_index": PICTURE,
    },
)
add(
    "LlavaForConditionalGeneration",
    "a tower, a projector and a language model",
    lambda model: model.generate(_with_patches(16), pixel_values=picture(), **GREEDY),
    {
        "vision_config": {"model_type": "clip_vision_model", **VISION},
        "text_config": {"model_type": "llama", **TEXT, "num_key_value_heads": 2},
        "image_token_index": PICTURE,
        "image_token_id": PICTURE,
        "vision_feature_layer": -1,
    },
)
add(
    "UdopForConditionalGeneration",
    "biases that layers share, in a list; an embedding three times",
    _run_udop,
    {**T5, "image_size": 32, "patch_size": 8, "max_2d_position_embeddings": 64},
)
add(
    "ChameleonForConditionalGeneration",
    "a codec of pictures whose codes become tokens",
    _run_chameleon,
    {
        **TEXT,
        "num_key_value_heads": 2,
        "vq_config": {
            "embed_dim": 8,
            "num_embeddings": 10,
            "latent_channels": 8,
            "resolution": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
        },
        "vocabulary_map": {
            "<image>": PICTURE,
            **{f"IMGIMG{chr(65 + n)}Z": 8 + n for n in range(10)},
        },
    },
)
add(
    "BridgeTowerModel",
    "calls the layers of its two models by itself, one by one",
    lambda model: model(ids(), pixel_values=picture()),
    {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "text_config": {**TEXT, "num_hidden_layers": 3, "hidden_size": 64},
        "vision_config": {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "patch_size": 8,
            "image_size": 32,
        },
    },
)
