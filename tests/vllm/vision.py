"""A tiny checkpoint of a model that sees: Qwen2.5-VL, as a thinker has its encoder.

`write` writes it. Importing this lets its processor be made here.
"""

import json
from pathlib import Path
from typing import Any

import transformers

# the name of a tokenizer's class; its package is not in this environment
transformers.MistralCommonBackend = type("MistralCommonBackend", (), {})

#: A prompt with a picture in it: the processor puts the picture's tokens where IMAGE is.
VISION_START, VISION_END, IMAGE, VIDEO = 3, 4, 5, 6
WORDS = 512


def write(path: str) -> None:
    """Two layers of vision, four of language; random weights, a tokenizer that knows numbers."""
    import torch

    folder = Path(path)
    torch.manual_seed(5)
    config = transformers.Qwen2_5_VLConfig(**_config())
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PICTURES))


def _config() -> dict[str, Any]:
    inner = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.2}
    return {
        "text_config": {
            **inner,
            "vocab_size": WORDS,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        "vision_config": {
            **inner,
            "depth": 2,
            "num_heads": 4,
            "out_hidden_size": 256,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": False,
    }


_PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 28 * 28,
    "max_pixels": 112 * 112,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = [
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    ]
    words = special + [f"w{number}" for number in range(len(special), WORDS)]
    known = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special[0],
        pad_token=special[0],
        additional_special_tokens=special[1:],
    )
