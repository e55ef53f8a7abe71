"""Inputs of models: drawn when a run begins, which seeds the generators."""

from typing import Any

import torch

VOCABULARY = 64

#: For `generate`: four tokens, with their scores.
GREEDY: dict[str, Any] = {
    "max_new_tokens": 4,
    "min_new_tokens": 4,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
#: For configurations, whose default special tokens are outside of a small vocabulary.
SPECIAL: dict[str, int] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
#: Of most transformers.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    **SPECIAL,
}
#: Of T5 and its kin.
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
#: Of an encoder and a decoder.
CODEC: dict[str, int] = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
#: A vision tower: 16 patches.
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def ids(length: int = 7, batch: int = 1) -> torch.Tensor:
    """Tokens, none of them a special one."""
    return torch.randint(8, VOCABULARY, (batch, length))


def picture(size: int = 32, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)
