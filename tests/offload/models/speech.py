"""A Whisper and a plain decoder language model, each with its own `generate()`."""

from collections.abc import Callable
from typing import Any

import torch

from tests.offload.models.weights import draw

Outputs = dict[str, torch.Tensor]

VOCABULARY = 512


def whisper() -> tuple[torch.nn.Module, Callable[[], Outputs]]:
    """A reduced Whisper, whose output layer is its embedding, and a function that runs it once."""
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=32,
        d_model=256,
        encoder_layers=4,
        encoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_layers=4,
        decoder_attention_heads=4,
        decoder_ffn_dim=1024,
        max_source_positions=100,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    model: Any = transformers.WhisperForConditionalGeneration._from_config(config).eval()
    draw(model, 11)
    sound = torch.randn(1, 32, 200, generator=torch.Generator().manual_seed(12))

    @torch.no_grad()
    def run() -> Outputs:
        said = model.generate(
            sound,
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        return {"tokens": said.sequences, "scores": torch.stack(said.scores)}

    return model, run


def decoder() -> tuple[torch.nn.Module, Callable[[], Outputs]]:
    """A reduced Llama with tied embeddings, and a function that runs it: sampling, two prompts."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = transformers.LlamaForCausalLM._from_config(config).eval()
    draw(model, 13)
    prompts = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(14))

    @torch.no_grad()
    def run() -> Outputs:
        torch.manual_seed(15)
        said = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=8,
            do_sample=True,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return {"tokens": said.sequences, "logits": torch.stack(said.logits)}

    return model, run
