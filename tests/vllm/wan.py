"""A program: `python -m tests.vllm.wan FOLDER` writes a tiny Wan2.2, with random weights.

Of the sizes of a test, and of the form of the real one: an encoder, two DiTs, a VAE.
"""

import json
import sys
from pathlib import Path

#: Of the encoder's embeddings, which the DiTs are given.
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


def write(folder: Path) -> None:
    """Write the checkpoint, in the folders that diffusers has."""
    import torch
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
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


if __name__ == "__main__":
    write(Path(sys.argv[1]))
