"""Models of pictures."""

from functools import partial
from typing import Any

import torch

from tests.offload.zoo.entries import Subject, entry, of_transformers
from tests.offload.zoo.inputs import CODEC, VISION, picture

add = partial(of_transformers, "vision")

PROMPTS: dict[str, Any] = {
    "hidden_size": 16,
    "image_size": 32,
    "patch_size": 8,
    "mask_input_channels": 4,
}
DECODER: dict[str, Any] = {"mlp_dim": 32, "num_attention_heads": 4, "iou_head_hidden_dim": 16}


def _run_sam(model: Any) -> object:
    points = torch.tensor([[[[8.0, 8.0], [16.0, 20.0]]]])
    labels = torch.ones(1, 1, 2, dtype=torch.int64)
    prompts = model.get_prompt_embeddings(input_points=points, input_labels=labels)
    return prompts, model(picture(), points, labels)


add(
    "SamModel",
    "returns an embedding's weight, expanded; a random buffer",
    _run_sam,
    {
        "vision_config": {
            **VISION,
            "mlp_dim": 48,
            "output_channels": 16,
            "num_pos_feats": 8,
            "window_size": 2,
            "global_attn_indexes": [1],
        },
        "prompt_encoder_config": PROMPTS,
        "mask_decoder_config": {"hidden_size": 16, **DECODER},
    },
)


@entry(
    "Sam2VideoModel",
    "a generator of frames; its state from one to the next may be a weight",
    often=True,
)
def sam2_video() -> Subject:
    from transformers import Sam2VideoConfig, Sam2VideoModel
    from transformers.models.sam2_video.modeling_sam2_video import Sam2VideoInferenceSession

    model = Sam2VideoModel(
        Sam2VideoConfig(
            vision_config={
                "backbone_config": {
                    "model_type": "sam2_hiera_det_model",
                    "hidden_size": 8,
                    "num_attention_heads": 1,
                    "image_size": [64, 64],
                    "blocks_per_stage": [1, 1, 2, 1],
                    "embed_dim_per_stage": [8, 16, 32, 64],
                    "num_attention_heads_per_stage": [1, 2, 4, 4],
                    "window_size_per_stage": [8, 4, 8, 4],
                    "window_positional_embedding_background_size": [4, 4],
                    "global_attention_blocks": [3],
                },
                "backbone_channel_list": [64, 32, 16, 8],
                "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
                "fpn_hidden_size": 128,
            },
            prompt_encoder_config={
                **PROMPTS,
                "hidden_size": 128,
                "image_size": 64,
                "patch_size": 16,
            },
            mask_decoder_config={"hidden_size": 128, **DECODER},
            image_size=64,
            num_maskmem=3,
            memory_attention_hidden_size=128,
            memory_attention_num_layers=2,
            memory_attention_feed_forward_hidden_size=32,
            memory_attention_rope_feat_sizes=[4, 4],
            memory_encoder_hidden_size=128,
            memory_encoder_output_channels=64,
            mask_downsampler_embed_dim=128,
            memory_fuser_embed_dim=128,
            memory_fuser_intermediate_dim=32,
        )
    )

    def run() -> object:
        session = Sam2VideoInferenceSession(
            video=torch.randn(3, 3, 64, 64),
            video_height=64,
            video_width=64,
            dtype=torch.float32,
        )
        one = session.obj_id_to_idx(1)
        points = {
            "point_coords": torch.tensor([[[[8.0, 8.0]]]]),
            "point_labels": torch.ones(1, 1, 1, dtype=torch.int32),
        }
        session.add_point_inputs(one, 0, points)
        session.obj_with_new_inputs.append(1)
        seen = [
            (frame.frame_idx, frame.pred_masks)
            for frame in model.propagate_in_video_iterator(session, start_frame_idx=0)
        ]
        return seen, session.output_dict_per_obj

    return Subject(model, run)


@entry("DeformableDetrForObjectDetection", "heads that are clones; a weight is split for queries")
def deformable_detr() -> Subject:
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, ResNetConfig

    model = DeformableDetrForObjectDetection(
        DeformableDetrConfig(
            backbone_config=ResNetConfig(
                embedding_size=8,
                hidden_sizes=[8, 16],
                depths=[1, 1],
                layer_type="basic",
                out_features=["stage1", "stage2"],
            ),
            use_timm_backbone=False,
            backbone=None,
            d_model=32,
            **CODEC,
            encoder_n_points=2,
            decoder_n_points=2,
            num_feature_levels=2,
            num_queries=5,
            num_labels=4,
            with_box_refine=True,
        )
    )
    return Subject(model, lambda: model(picture(64)))


add(
    "PerceiverForMaskedLM",
    "latents that are a parameter, expanded; a child's embedding goes to another child",
    lambda model: model(torch.randint(0, 64, (1, 16))),
    {
        "num_latents": 8,
        "d_latents": 32,
        "d_model": 32,
        "num_blocks": 2,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4,
        "num_cross_attention_heads": 4,
        "qk_channels": 32,
        "v_channels": 32,
        "vocab_size": 64,
        "max_position_embeddings": 16,
    },
)
add(
    "GraniteDoclingVisionModel",
    "the model itself calls the layers of its encoder",
    lambda model: (model(picture()), model(picture(), fine=True)),
    {**VISION, "out_hidden_size": 16, "scale_factor": 2, "deepstack_visual_indexes": [0]},
)
