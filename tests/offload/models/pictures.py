"""Pipelines of diffusers, reduced: Flux makes a picture, Wan a video.

Encoders, DiTs, VAE and scheduler are the real classes, and `__call__` is the pipeline's own.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.offload.model import build, paint
from benchmarks.offload.tokens import VOCABULARY, letters
from tests.offload.models.weights import draw

Outputs = dict[str, torch.Tensor]

PROMPT = "a fox"


def flux() -> tuple[Any, Callable[[], Outputs]]:
    """Flux: a CLIP and a T5 encoder, one DiT, and a function that makes one picture."""
    pipeline = build(width=128)
    _seeded(pipeline, 21)
    return pipeline, lambda: {"picture": paint(pipeline, 3)}


def wan() -> tuple[Any, Callable[[], Outputs]]:
    """Wan 2.2: one encoder, two DiTs in sequence, and a function that makes one video."""
    import diffusers
    import transformers

    pipeline = diffusers.WanPipeline(
        tokenizer=letters(32),
        text_encoder=transformers.UMT5EncoderModel(
            transformers.UMT5Config(
                vocab_size=VOCABULARY, d_model=256, d_kv=32, d_ff=768, num_layers=4, num_heads=8
            )
        ),
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
    _seeded(pipeline, 23)

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
