"""Pipelines of diffusers, reduced: Flux makes a picture, Wan a video.

Encoders, DiTs, VAE and scheduler are the real classes, and `__call__` is the pipeline's own.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.offload.tokens import VOCABULARY, letters
from tests.offload.models.weights import draw

Outputs = dict[str, torch.Tensor]

PROMPT = "a fox"
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 256,
    "d_kv": 32,
    "d_ff": 768,
    "num_layers": 4,
    "num_heads": 8,
}


def flux(seed: int = 21) -> tuple[Any, Callable[[], Outputs]]:
    """Flux: a CLIP and a T5 encoder, one DiT, and a function that makes one picture."""
    import diffusers
    import transformers

    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                vocab_size=VOCABULARY,
                hidden_size=192,
                intermediate_size=768,
                num_hidden_layers=3,
                num_attention_heads=4,
                max_position_embeddings=32,
                projection_dim=192,
                bos_token_id=1,
                eos_token_id=2,
                pad_token_id=0,
            )
        ),
        tokenizer=letters(32),
        text_encoder_2=transformers.T5EncoderModel(transformers.T5Config(**T5)),
        tokenizer_2=letters(32),
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=3,
            attention_head_dim=32,
            num_attention_heads=6,
            joint_attention_dim=256,
            pooled_projection_dim=192,
            axes_dims_rope=(8, 12, 12),
        ),
        vae=diffusers.AutoencoderKL(
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=8,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.06,
            scaling_factor=1.5,
        ),
    )
    _seeded(pipeline, seed)

    def run() -> Outputs:
        picture = pipeline(
            PROMPT,
            height=32,
            width=32,
            num_inference_steps=3,
            max_sequence_length=16,
            generator=torch.Generator().manual_seed(24),
            output_type="pt",
        ).images
        return {"picture": picture}

    return pipeline, run


def wan(seed: int = 23) -> tuple[Any, Callable[[], Outputs]]:
    """Wan 2.2: one encoder, two DiTs in sequence, and a function that makes one video."""
    import diffusers
    import transformers

    pipeline = diffusers.WanPipeline(
        tokenizer=letters(32),
        text_encoder=transformers.UMT5EncoderModel(transformers.UMT5Config(**T5)),
        vae=diffusers.AutoencoderKLWan(
            base_dim=16, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1
        ),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=_wan_dit(),
        transformer_2=_wan_dit(),
        boundary_ratio=0.875,
    )
    _seeded(pipeline, seed)

    def run() -> Outputs:
        video = pipeline(
            PROMPT,
            height=32,
            width=32,
            num_frames=5,
            num_inference_steps=4,
            guidance_scale=3.0,
            max_sequence_length=16,
            generator=torch.Generator().manual_seed(24),
            output_type="pt",
        ).frames
        return {"video": video}

    return pipeline, run


def _seeded(pipeline: Any, seed: int) -> None:
    for offset, (name, part) in enumerate(sorted(pipeline.components.items())):
        if isinstance(part, torch.nn.Module):
            draw(part.eval(), seed * 100 + offset, gain=0.5 if name == "vae" else 1.0)
    pipeline.set_progress_bar_config(disable=True)


def _wan_dit() -> Any:
    import diffusers

    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=6,
        attention_head_dim=32,
        in_channels=16,
        out_channels=16,
        text_dim=256,
        freq_dim=64,
        ffn_dim=768,
        num_layers=3,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
