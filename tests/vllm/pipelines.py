"""Tiny models with random weights, written into a folder.

They have the structure of real ones: Wan2.2 (an encoder, two DiTs, a VAE), Qwen-Image, Flux, Stable
Diffusion 3 (three encoders).
"""

import json
from pathlib import Path

#: The width of an encoder's embeddings, the input of the DiTs.
TEXT_WIDTH = 64


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(("<pad>", "</s>", "<unk>", "a", "boat", "at", "sea"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)


def write_wan(folder: Path) -> None:
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    _write_tokenizer(folder / "tokenizer")
    text = UMT5Config(
        vocab_size=512, d_model=TEXT_WIDTH, d_ff=128, d_kv=16, num_heads=4, num_layers=2
    )
    UMT5EncoderModel(text).save_pretrained(folder / "text_encoder")
    for name in ("transformer", "transformer_2"):
        WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=32,
            in_channels=16,
            out_channels=16,
            text_dim=TEXT_WIDTH,
            freq_dim=64,
            ffn_dim=512,
            num_layers=4,
        ).save_pretrained(folder / name)
    AutoencoderKLWan(base_dim=16, z_dim=16, num_res_blocks=1).save_pretrained(folder / "vae")
    classes = {
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    index = {"_class_name": "WanPipeline", "boundary_ratio": 0.9, **classes}
    (folder / "model_index.json").write_text(json.dumps(index))


def _write_byte_tokenizer(folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    words = {word: number for number, word in enumerate((*sorted(ByteLevel.alphabet()), *special))}
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = {"tokenizer_class": "Qwen2Tokenizer", "pad_token": special[0], "eos_token": special[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_qwen_image(folder: Path | str, layers: int = 3, text_inner: int = 128) -> None:
    """`layers`: of the DiT. `text_inner`: the width of the encoder's MLPs."""
    folder = Path(folder)
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    _write_byte_tokenizer(folder / "tokenizer")
    text = {
        "vocab_size": 512,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": text_inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "max_position_embeddings": 4096,
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": TEXT_WIDTH}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder / "text_encoder")
    QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=layers,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    ).save_pretrained(folder / "transformer")
    vae = AutoencoderKLQwenImage(base_dim=16, z_dim=16, num_res_blocks=1)
    vae.save_pretrained(folder / "vae")
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.save_pretrained(folder / "scheduler")
    classes = {
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    index = {"_class_name": "QwenImagePipeline", **classes}
    (folder / "model_index.json").write_text(json.dumps(index))


def _write_clip(folder: Path, number: str, architecture: str, width: int) -> None:
    """An encoder and its tokenizer, whose tokens are single characters."""
    import transformers
    from transformers.models.clip.modeling_clip import CLIPTextConfig

    special = ("<|startoftext|>", "<|endoftext|>")
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(f"{one}</w>" for one in letters), *special]
    names = {"bos_token": special[0], "eos_token": special[1], "pad_token": special[1]}
    at = folder / f"tokenizer{number}"
    at.mkdir()
    (at / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (at / "merges.txt").write_text("#version: 0.2\n")
    said = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, **names}
    (at / "tokenizer_config.json").write_text(json.dumps({**said, "unk_token": special[1]}))
    config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=width,
        projection_dim=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=len(words) - 2,
        eos_token_id=len(words) - 1,
    )
    made = getattr(transformers, architecture)(config)
    made.save_pretrained(folder / f"text_encoder{number}")


def _write_t5(folder: Path, number: str) -> None:
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    words = [(word, 0.0) for word in ("<pad>", "</s>", "<unk>")]
    words += [(word, -2.0) for word in ("\u2581", *"abcdefghijklmnopqrstuvwxyz")]
    T5Tokenizer(vocab=words, extra_ids=0).save_pretrained(folder / f"tokenizer{number}")
    sizes = {"d_model": TEXT_WIDTH, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2}
    config = T5Config(vocab_size=512, feed_forward_proj="gated-gelu", **sizes)
    T5EncoderModel(config).save_pretrained(folder / f"text_encoder{number}")


def _write_kl_vae(folder: Path) -> None:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler

    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(64, 128),
        latent_channels=16,
        norm_num_groups=16,
        shift_factor=0.1,
        scaling_factor=0.5,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).save_pretrained(folder / "vae")
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.save_pretrained(folder / "scheduler")


def write_flux(folder: Path) -> None:
    from diffusers import FluxTransformer2DModel

    _write_clip(folder, "", "CLIPTextModel", TEXT_WIDTH)
    _write_t5(folder, "_2")
    _write_kl_vae(folder)
    FluxTransformer2DModel(
        in_channels=64,
        num_layers=3,
        num_single_layers=3,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    ).save_pretrained(folder / "transformer")
    classes = {
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "T5TokenizerFast"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "T5EncoderModel"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps({"_class_name": folder.name, **classes}))


def write_sd3(folder: Path) -> None:
    from diffusers import SD3Transformer2DModel

    for number in ("", "_2"):
        _write_clip(folder, number, "CLIPTextModelWithProjection", TEXT_WIDTH // 2)
    _write_t5(folder, "_3")
    _write_kl_vae(folder)
    SD3Transformer2DModel(
        sample_size=32,
        in_channels=16,
        out_channels=16,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=128,
        pooled_projection_dim=TEXT_WIDTH,
        pos_embed_max_size=16,
    ).save_pretrained(folder / "transformer")
    classes = {
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "tokenizer_3": ["transformers", "T5Tokenizer"],
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_3": ["transformers", "T5EncoderModel"],
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps({"_class_name": folder.name, **classes}))


PIPELINES = {
    "WanPipeline": write_wan,
    "QwenImagePipeline": write_qwen_image,
    "FluxPipeline": write_flux,
    "StableDiffusion3Pipeline": write_sd3,
}


def write_all(folder: str) -> None:
    import torch

    for name, write in PIPELINES.items():
        torch.manual_seed(0)
        made = Path(folder, name)
        made.mkdir()
        write(made)
