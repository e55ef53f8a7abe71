"""Makes a checkpoint of a decoder with random weights: `checkpoint.py FOLDER LAYERS WIDTH`."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main(folder: str, layers: str, width: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=int(width),
        intermediate_size=4 * int(width),
        num_hidden_layers=int(layers),
        num_attention_heads=int(width) // 64,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="256MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
