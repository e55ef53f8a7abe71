"""Models of diffusers: DiTs, U-Nets, VAEs, ControlNets and whole pipelines."""

from typing import Any

import torch

from benchmarks.offload.tokens import VOCABULARY, letters
from tests.offload.zoo.entries import Subject, entry

UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}
UP = ("UpBlock2D", "CrossAttnUpBlock2D")
LATENTS = (1, 4, 8, 8)
STEP = torch.tensor([7])


def _made(name: str, **config: Any) -> Any:
    import diffusers

    return getattr(diffusers, name)(**config)


def _vae() -> Any:
    return _made(
        "AutoencoderKL",
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )


@entry("AutoencoderKL", "encode, decode, tiles and slices, none of which is forward", often=True)
def autoencoder_kl() -> Subject:
    model = _vae()

    def run() -> object:
        latents = model.encode(torch.randn(1, 3, 32, 32)).latent_dist.mean
        whole = model.decode(latents).sample
        model.enable_tiling()
        model.enable_slicing()
        tiled = model.decode(torch.cat([latents, latents])).sample
        model.disable_tiling()
        model.disable_slicing()
        return latents, whole, tiled

    return Subject(model, run)


@entry("AutoencoderOobleck", "weight norm on every convolution; Snake's parameters")
def autoencoder_oobleck() -> Subject:
    model = _made(
        "AutoencoderOobleck",
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        channel_multiples=[1, 2],
        decoder_channels=8,
        decoder_input_channels=4,
    )

    def run() -> object:
        latents = model.encode(torch.randn(1, 2, 64)).latent_dist.mean
        return latents, model.decode(latents).sample

    return Subject(model, run)


@entry("AutoencoderKLWan", "convolutions that keep the last frames in the model")
def autoencoder_wan() -> Subject:
    model = _made(
        "AutoencoderKLWan",
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )

    def run() -> object:
        latents = model.encode(torch.randn(1, 3, 5, 16, 16)).latent_dist.mean
        return latents, model.decode(latents).sample

    return Subject(model, run)


@entry("UNet2DConditionModel", "the way up reads states of the way down")
def unet() -> Subject:
    model = _made("UNet2DConditionModel", **UNET, up_block_types=UP)
    return Subject(model, lambda: model(torch.randn(LATENTS), STEP, torch.randn(1, 5, 16)).sample)


@entry("UNetControlNetXSModel", "a U-Net and its control, block by block in one")
def unet_xs() -> Subject:
    import diffusers

    base = _made("UNet2DConditionModel", **{**UNET, "layers_per_block": 2}, up_block_types=UP)
    control = diffusers.ControlNetXSAdapter.from_unet(base, size_ratio=0.5, num_attention_heads=2)
    model = diffusers.UNetControlNetXSModel.from_unet(base, control)

    def run() -> object:
        return model(
            torch.randn(LATENTS), STEP, torch.randn(1, 5, 16), torch.randn(1, 3, 64, 64)
        ).sample

    return Subject(model, run)


@entry("StableCascadeUNet", "levels of blocks, up and down, in lists of lists")
def stable_cascade() -> Subject:
    model = _made(
        "StableCascadeUNet",
        in_channels=4,
        out_channels=4,
        conditioning_dim=16,
        block_out_channels=(16, 32),
        num_attention_heads=(0, 4),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1),
        block_types_per_layer=(
            ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
            ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
        ),
        clip_text_in_channels=16,
        clip_text_pooled_in_channels=16,
        clip_image_in_channels=16,
        clip_seq=2,
        dropout=(0.0, 0.0),
    )

    def run() -> object:
        return model(
            torch.randn(1, 4, 8, 8),
            torch.tensor([0.5]),
            clip_text_pooled=torch.randn(1, 1, 16),
            clip_text=torch.randn(1, 3, 16),
            clip_img=torch.randn(1, 1, 16),
        ).sample

    return Subject(model, run)


@entry("SD3Transformer2DModel", "positions that are a buffer, cropped; two streams of attention")
def sd3() -> Subject:
    model = _made(
        "SD3Transformer2DModel",
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )

    def run() -> object:
        return model(torch.randn(LATENTS), torch.randn(1, 5, 16), torch.randn(1, 16), STEP).sample

    return Subject(model, run)


def _flux_sizes() -> dict[str, Any]:
    return {
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (2, 2, 4),
        "guidance_embeds": True,
    }


def _flux_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 5, 16),
        "pooled_projections": torch.randn(1, 16),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(5, 3),
        "guidance": torch.tensor([3.5]),
    }


@entry("FluxTransformer2DModel with FluxControlNetModel", "one model's outputs go into the other's")
def flux_control() -> Subject:
    dit = _made("FluxTransformer2DModel", **_flux_sizes())
    control = _made("FluxControlNetModel", **_flux_sizes())

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer, self.controlnet = dit, control

        def forward(self) -> object:
            given = _flux_inputs()
            blocks, singles = self.controlnet(
                controlnet_cond=torch.randn(1, 16, 4), return_dict=False, **given
            )
            return blocks, self.transformer(
                **given,
                controlnet_block_samples=blocks,
                controlnet_single_block_samples=singles,
                return_dict=False,
            )

    model = Both()
    return Subject(model, model)


@entry("DiTTransformer2DModel", "calls a part of the first block after all blocks have run")
def dit() -> Subject:
    model = _made(
        "DiTTransformer2DModel",
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        num_embeds_ada_norm=10,
    )
    return Subject(model, lambda: model(torch.randn(LATENTS), STEP, torch.tensor([3])).sample)


@entry("PixArtTransformer2DModel", "a table of scales that the model itself reads and adds")
def pixart() -> Subject:
    model = _made(
        "PixArtTransformer2DModel",
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=48,
        caption_channels=16,
        sample_size=8,
        patch_size=2,
        use_additional_conditions=True,
    )

    def run() -> object:
        more = {"resolution": torch.tensor([[64.0, 64.0]]), "aspect_ratio": torch.tensor([[1.0]])}
        return model(
            torch.randn(LATENTS), torch.randn(1, 5, 16), STEP, added_cond_kwargs=more
        ).sample

    return Subject(model, run)


@entry("PriorTransformer", "statistics of embeddings in parameters that methods read")
def prior() -> Subject:
    model = _made(
        "PriorTransformer",
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=5,
        additional_embeddings=4,
    )

    def run() -> object:
        seen = model(
            torch.randn(1, 16),
            STEP,
            proj_embedding=torch.randn(1, 16),
            encoder_hidden_states=torch.randn(1, 5, 16),
        ).predicted_image_embedding
        return model.post_process_latents(seen)

    return Subject(model, run)


# --- pipelines ---------------------------------------------------------------------------


def _clip() -> Any:
    import transformers

    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def _sd(name: str, **parts: Any) -> Any:
    import diffusers

    whole = {
        "vae": _vae(),
        "text_encoder": _clip(),
        "tokenizer": letters(16),
        "unet": _made("UNet2DConditionModel", **UNET, up_block_types=UP),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
        **parts,
    }
    pipeline = getattr(diffusers, name)(**whole)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _control() -> Any:
    sizes = {name: value for name, value in UNET.items() if name != "sample_size"}
    return _made("ControlNetModel", **sizes, conditioning_embedding_out_channels=(8, 16))


@entry("StableDiffusionControlNetPipeline", "two ControlNets and a U-Net; EulerAncestral")
def controlnet_pipeline() -> Subject:
    import diffusers

    pipeline = _sd(
        "StableDiffusionControlNetPipeline",
        scheduler=diffusers.EulerAncestralDiscreteScheduler(),
        controlnet=diffusers.MultiControlNetModel([_control(), _control()]),
    )

    def run() -> object:
        return pipeline(
            "a fox",
            image=[torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16)],
            height=16,
            width=16,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(3),
            output_type="pt",
        ).images

    return Subject(pipeline, run)
