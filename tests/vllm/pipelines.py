"""Tiny models with random weights, written into a folder.

Of the sizes of a test, and of the form of the real ones: Wan2.2 (an encoder, two DiTs, a VAE), and
Qwen-Image.
"""

import json
from pathlib import Path

#: Of an encoder's embeddings, which the DiTs are given.
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


def write_qwen_image(folder: Path) -> None:
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
        "intermediate_size": 128,
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
        num_layers=3,
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


def write_all(folder: str) -> None:
    import torch

    for name, write in (("WanPipeline", write_wan), ("QwenImagePipeline", write_qwen_image)):
        torch.manual_seed(0)
        made = Path(folder, name)
        made.mkdir()
        write(made)
