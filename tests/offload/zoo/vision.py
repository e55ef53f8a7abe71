"""Models of pictures."""

from typing import Any

import torch

from tests.offload.zoo.entries import Subject, entry
from tests.offload.zoo.inputs import picture

#: Of the transformers among them.
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}


@entry("SamModel", "returns an embedding's weight, expanded; a random buffer", often=True)
def sam() -> Subject:
    from transformers import SamConfig, SamModel

    model = SamModel(
        SamConfig(
            vision_config={
                **SMALL,
                "mlp_dim": 48,
                "output_channels": 16,
                "num_pos_feats": 8,
                "window_size": 2,
                "global_attn_indexes": [1],
            },
            prompt_encoder_config={
                "hidden_size": 16,
                "image_size": 32,
                "patch_size": 8,
                "mask_input_channels": 4,
            },
            mask_decoder_config={
                "hidden_size": 16,
                "mlp_dim": 32,
                "num_attention_heads": 4,
                "iou_head_hidden_dim": 16,
            },
        )
    )

    def run() -> object:
        points = torch.tensor([[[[8.0, 8.0], [16.0, 20.0]]]])
        labels = torch.ones(1, 1, 2, dtype=torch.int64)
        prompts = model.get_prompt_embeddings(input_points=points, input_labels=labels)
        return prompts, model(picture(), points, labels)

    return Subject(model, run)


@entry(
    "SamPromptEncoder",
    "returns an embedding's weight, expanded",
    often=True,
)
def sam_prompts() -> Subject:
    from transformers import SamPromptEncoderConfig
    from transformers.models.sam.modeling_sam import SamConfig, SamPromptEncoder

    prompts = SamPromptEncoderConfig(
        hidden_size=16, image_size=32, patch_size=8, mask_input_channels=4
    )
    config = SamConfig(vision_config={"num_pos_feats": 8}, prompt_encoder_config=prompts.to_dict())
    model = SamPromptEncoder(config)
    return Subject(model, lambda: model(None, None, torch.tensor([[[1.0, 2.0, 9.0, 8.0]]]), None))


def _sam2(width: int) -> dict[str, Any]:
    return {
        "vision_config": {
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
            "fpn_hidden_size": width,
        },
        "prompt_encoder_config": {
            "hidden_size": width,
            "image_size": 64,
            "patch_size": 16,
            "mask_input_channels": 4,
        },
        "mask_decoder_config": {
            "hidden_size": width,
            "mlp_dim": 32,
            "num_attention_heads": 4,
            "iou_head_hidden_dim": 16,
        },
    }


@entry("Sam2Model", "pyramids of features; weights are added to the outputs")
def sam2() -> Subject:
    from transformers import Sam2Config, Sam2Model

    model = Sam2Model(Sam2Config(**_sam2(16)))

    def run() -> object:
        points = torch.tensor([[[[8.0, 8.0]]]])
        labels = torch.ones(1, 1, 1, dtype=torch.int32)
        seen = model.get_image_embeddings(picture(64))
        return seen, model(input_points=points, input_labels=labels, image_embeddings=seen)

    return Subject(model, run)


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
            **_sam2(128),
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


def _resnet() -> Any:
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )


@entry("DetrForObjectDetection", "batch norms that are buffers; queries that are a weight")
def detr() -> Subject:
    from transformers import DetrConfig, DetrForObjectDetection

    model = DetrForObjectDetection(
        DetrConfig(
            backbone_config=_resnet(),
            use_timm_backbone=False,
            backbone=None,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_queries=5,
            num_labels=4,
        )
    )
    return Subject(model, lambda: model(picture(64)))


@entry("DeformableDetrForObjectDetection", "heads that are clones; a weight is split for queries")
def deformable_detr() -> Subject:
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection

    backbone = _resnet()
    backbone.out_features = ["stage1", "stage2"]
    model = DeformableDetrForObjectDetection(
        DeformableDetrConfig(
            backbone_config=backbone,
            use_timm_backbone=False,
            backbone=None,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            encoder_n_points=2,
            decoder_n_points=2,
            num_feature_levels=2,
            num_queries=5,
            num_labels=4,
            with_box_refine=True,
        )
    )
    return Subject(model, lambda: model(picture(64)))


@entry("RTDetrForObjectDetection", "anchors that are kept; heads shared with the decoder")
def rt_detr() -> Subject:
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

    model = RTDetrForObjectDetection(
        RTDetrConfig(
            backbone_config=RTDetrResNetConfig(
                embedding_size=8,
                hidden_sizes=[8, 16, 16, 16],
                depths=[1, 1, 1, 1],
                layer_type="basic",
                out_features=["stage2", "stage3", "stage4"],
            ),
            encoder_in_channels=[16, 16, 16],
            encoder_hidden_dim=32,
            encoder_ffn_dim=48,
            encoder_attention_heads=4,
            d_model=32,
            num_queries=5,
            decoder_in_channels=[32, 32, 32],
            decoder_ffn_dim=48,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_n_points=2,
            num_labels=4,
            anchor_image_size=[64, 64],
            eval_size=64,
        )
    )
    return Subject(model, lambda: model(picture(64)))


@entry("Mask2FormerModel", "a Swin in it; masks by products with features")
def mask2former() -> Subject:
    from transformers import Mask2FormerConfig, Mask2FormerModel, SwinConfig

    model = Mask2FormerModel(
        Mask2FormerConfig(
            backbone_config=SwinConfig(
                image_size=64,
                patch_size=4,
                embed_dim=8,
                depths=[1, 1, 1, 1],
                num_heads=[1, 1, 2, 2],
                window_size=2,
                out_features=["stage1", "stage2", "stage3", "stage4"],
            ),
            feature_size=32,
            mask_feature_size=32,
            hidden_dim=32,
            encoder_feedforward_dim=32,
            encoder_layers=1,
            decoder_layers=3,
            num_attention_heads=2,
            dim_feedforward=32,
            num_queries=5,
            num_labels=4,
        )
    )
    return Subject(model, lambda: model(picture(64)))


@entry("LevitModel", "batch norms behind every product; biases that are gathered and kept")
def levit() -> Subject:
    from transformers import LevitConfig, LevitModel

    model = LevitModel(
        LevitConfig(
            image_size=64,
            hidden_sizes=[16, 24, 32],
            num_attention_heads=[2, 3, 4],
            depths=[2, 2, 2],
            key_dim=[8, 8, 8],
            mlp_ratio=[2, 2, 2],
            attention_ratio=[2, 2, 2],
        )
    )
    return Subject(model, lambda: model(picture(64)))


@entry("BeitModel", "a table of biases that is read by indices in a buffer")
def beit() -> Subject:
    from transformers import BeitConfig, BeitModel

    model = BeitModel(
        BeitConfig(
            **SMALL,
            use_relative_position_bias=True,
            use_shared_relative_position_bias=True,
            use_mask_token=True,
            layer_scale_init_value=0.5,
        )
    )
    return Subject(model, lambda: model(picture()))


@entry("ViTMAEForPreTraining", "random masks; a position embedding that is never trained")
def vit_mae() -> Subject:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    model = ViTMAEForPreTraining(
        ViTMAEConfig(
            **SMALL,
            decoder_hidden_size=16,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=32,
        )
    )
    return Subject(model, lambda: model(picture()))


@entry(
    "PerceiverForMaskedLM",
    "latents that are a parameter, expanded; a child's embedding goes to another child",
)
def perceiver() -> Subject:
    from transformers import PerceiverConfig, PerceiverForMaskedLM

    model = PerceiverForMaskedLM(
        PerceiverConfig(
            num_latents=8,
            d_latents=32,
            d_model=32,
            num_blocks=2,
            num_self_attends_per_block=2,
            num_self_attention_heads=4,
            num_cross_attention_heads=4,
            qk_channels=32,
            v_channels=32,
            vocab_size=64,
            max_position_embeddings=16,
        )
    )
    return Subject(model, lambda: model(torch.randint(0, 64, (1, 16))))


@entry("PerceiverForOpticalFlow", "a preprocessor of its own; queries made of the input")
def perceiver_flow() -> Subject:
    from transformers import PerceiverConfig, PerceiverForOpticalFlow

    model = PerceiverForOpticalFlow(
        PerceiverConfig(
            num_latents=8,
            d_latents=32,
            num_blocks=1,
            num_self_attends_per_block=2,
            num_self_attention_heads=4,
            num_cross_attention_heads=1,
            train_size=[8, 8],
        )
    )
    return Subject(model, lambda: model(torch.randn(1, 2, 27, 8, 8)))


@entry("SuperGlueForKeypointMatching", "a second model inside; batch norms; a lone parameter")
def super_glue() -> Subject:
    from transformers import SuperGlueConfig, SuperGlueForKeypointMatching, SuperPointConfig

    points = SuperPointConfig(
        encoder_hidden_sizes=[8, 8, 16, 16],
        decoder_hidden_size=16,
        keypoint_decoder_dim=65,
        descriptor_decoder_dim=16,
        keypoint_threshold=0.0,
        max_keypoints=12,
    )
    model = SuperGlueForKeypointMatching(
        SuperGlueConfig(
            keypoint_detector_config=points,
            hidden_size=16,
            keypoint_encoder_sizes=[8, 16],
            gnn_layers_types=["self", "cross"],
            num_attention_heads=4,
            sinkhorn_iterations=5,
        )
    )
    return Subject(model, lambda: model(torch.randn(1, 2, 3, 32, 32)))


@entry("EfficientNetForImageClassification", "batch norms and statistics in every block")
def efficient_net() -> Subject:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    model = EfficientNetForImageClassification(
        EfficientNetConfig(
            image_size=32,
            width_coefficient=0.25,
            depth_coefficient=0.25,
            hidden_dim=320,
            in_channels=[32, 16, 24],
            out_channels=[16, 24, 40],
            kernel_sizes=[3, 3, 5],
            depthwise_padding=[],
            strides=[1, 2, 2],
            num_block_repeats=[1, 1, 1],
            expand_ratios=[1, 2, 2],
            num_labels=4,
        )
    )
    return Subject(model, lambda: model(picture()))


@entry("ImageGPTForCausalImageModeling", "Conv1D; norms that have a weight and no bias")
def image_gpt() -> Subject:
    from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling

    model = ImageGPTForCausalImageModeling(
        ImageGPTConfig(vocab_size=65, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    )
    return Subject(model, lambda: model(torch.randint(0, 64, (1, 16))))


@entry("VitMatteForImageMatting", "a backbone with windows, and a decoder of convolutions")
def vit_matte() -> Subject:
    from transformers import VitDetConfig, VitMatteConfig, VitMatteForImageMatting

    model = VitMatteForImageMatting(
        VitMatteConfig(
            backbone_config=VitDetConfig(
                **{k: v for k, v in SMALL.items() if k != "intermediate_size"},
                num_channels=4,
                window_size=2,
                window_block_indices=[0],
                residual_block_indices=[1],
                use_relative_position_embeddings=True,
                out_features=["stage2"],
            ),
            hidden_size=32,
            convstream_hidden_sizes=[8, 16],
            fusion_hidden_sizes=[16, 8, 8],
        )
    )
    return Subject(model, lambda: model(torch.randn(1, 4, 32, 32)))


@entry("DPTForDepthEstimation", "a neck that reads the states of several layers")
def dpt() -> Subject:
    from transformers import DPTConfig, DPTForDepthEstimation

    model = DPTForDepthEstimation(
        DPTConfig(
            **{**SMALL, "num_hidden_layers": 4},
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 16, 16],
            fusion_hidden_size=16,
            is_hybrid=False,
        )
    )
    return Subject(model, lambda: model(picture()))


@entry("RfDetrModel", "windows of a tower; queries are the weights of embeddings")
def rf_detr() -> Subject:
    from transformers import RfDetrConfig, RfDetrModel
    from transformers.models.rf_detr.configuration_rf_detr import RfDetrDinov2Config

    backbone = RfDetrDinov2Config(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_windows=2,
        window_block_indexes=[0, 1],
        out_indices=[1, 3],
    )
    model = RfDetrModel(
        RfDetrConfig(
            backbone_config=backbone,
            d_model=32,
            c2f_num_blocks=1,
            decoder_ffn_dim=48,
            decoder_layers=2,
            decoder_self_attention_heads=4,
            decoder_cross_attention_heads=4,
            decoder_n_points=2,
            num_queries=4,
            group_detr=2,
        )
    )
    return Subject(model, lambda: model(picture()))


@entry("GraniteDoclingVisionModel", "the model itself calls the layers of its encoder")
def granite_docling() -> Subject:
    from transformers import GraniteDoclingVisionConfig, GraniteDoclingVisionModel

    model = GraniteDoclingVisionModel(
        GraniteDoclingVisionConfig(
            **SMALL,
            out_hidden_size=16,
            scale_factor=2,
            deepstack_visual_indexes=[0],
        )
    )
    return Subject(model, lambda: (model(picture()), model(picture(), fine=True)))
