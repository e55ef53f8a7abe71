"""One text-to-image pipeline in the proportions of a real one, with random weights.

Flux: of every 100 bytes 71 are the DiT's, 28 the T5 encoder's, and the rest CLIP's and the VAE's.
The classes and `__call__` are diffusers' and transformers' own.
"""

from typing import Any

import torch

from benchmarks.offload.tokens import VOCABULARY, letters

PROMPT = "a fox in snow"


def build(width: int) -> Any:
    """The pipeline; `width` is that of its DiT, a multiple of 32: 512 makes 470 MiB, 64 makes 7.

    Equal widths give bit-identical weights.
    """
    import diffusers
    import transformers

    # all imports are done: a later one would use the generator in between
    torch.manual_seed(width)
    clip = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=width // 4,
        intermediate_size=width,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    t5 = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=width,
        d_kv=64,
        d_ff=width * 5 // 2,
        num_layers=10,
        num_heads=width // 32,
    )
    pipeline: Any = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        text_encoder=transformers.CLIPTextModel(clip),
        tokenizer=letters(32),
        text_encoder_2=transformers.T5EncoderModel(t5),
        tokenizer_2=letters(32),
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=5,
            num_single_layers=10,
            attention_head_dim=32,
            num_attention_heads=width // 32,
            joint_attention_dim=width,
            pooled_projection_dim=width // 4,
            axes_dims_rope=(8, 12, 12),
        ),
        vae=diffusers.AutoencoderKL(
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=8,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.1,
        ),
    )
    for part in modules(pipeline).values():
        part.eval().requires_grad_(requires_grad=False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def modules(pipeline: Any) -> dict[str, torch.nn.Module]:
    """Its components that have weights, by name."""
    return {k: v for k, v in pipeline.components.items() if isinstance(v, torch.nn.Module)}


def paint(pipeline: Any, steps: int) -> torch.Tensor:
    """One picture; equal calls give bit-identical ones."""
    picture: torch.Tensor = pipeline(
        PROMPT,
        height=32,
        width=32,
        num_inference_steps=steps,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(1),
        output_type="pt",
    ).images
    return picture


def nbytes(module: torch.nn.Module) -> int:
    """Bytes of the parameters; tied ones count once."""
    return sum(p.numel() * p.element_size() for p in module.parameters())
