"""Models of text."""

from functools import partial
from typing import Any

import torch

from tests.offload.zoo.entries import Subject, entry, of_transformers
from tests.offload.zoo.inputs import CODEC, GREEDY, SMALL, SPECIAL, T5, VOCABULARY, ids

add = partial(of_transformers, "text")


def _generate(model: Any) -> Any:
    return model.generate(ids(), **GREEDY)


def _forward(model: Any) -> Any:
    return model(ids())


add(
    "T5ForConditionalGeneration",
    "one embedding under four names; a bias of the first layer is used by the others",
    _generate,
    T5,
    often=True,
)
add(
    "ReformerModelWithLMHead",
    "random hashes; reversible layers; a ParameterList that the embedding expands",
    lambda model: model(ids(32)),
    {
        "vocab_size": VOCABULARY,
        "attn_layers": ["local", "lsh"],
        "hidden_size": 32,
        "num_attention_heads": 4,
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [16, 16],
        "max_position_embeddings": 32,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "is_decoder": True,
        "hash_seed": 1,
    },
    often=True,
)
add(
    "DebertaV2ForMaskedLM",
    "an embedding's weight, normed, goes into every layer",
    _forward,
    {
        **SMALL,
        "max_position_embeddings": 64,
        "relative_attention": True,
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "conv_kernel_size": 3,
    },
    often=True,
)
add(
    "MambaForCausalLM",
    "a state space; its convolution's weight is read beside the call",
    _generate,
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
        "time_step_rank": 4,
        **SPECIAL,
    },
)
add(
    "RwkvForCausalLM",
    "divides weights in place at the first call that is no training",
    _generate,
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "attention_hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "context_length": 32,
        "rescale_every": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    often=True,
)
add(
    "MixtralForCausalLM",
    "experts in one tensor, of which a call reads some",
    _generate,
    {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
)
add(
    "GPT2LMHeadModel",
    "Conv1D; tied; beams reorder the cache",
    lambda model: model.generate(ids(), num_beams=2, **GREEDY),
    {
        "vocab_size": VOCABULARY,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        **SPECIAL,
    },
)
add(
    "AlbertForMaskedLM",
    "one layer that runs three times",
    _forward,
    {**SMALL, "num_hidden_layers": 3, "embedding_size": 16},
)
add(
    "Zamba2ForCausalLM",
    "one transformer under several names, with adapters for each",
    _generate,
    {
        **SMALL,
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 4,
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"],
        "use_shared_attention_adapter": True,
        "adapter_rank": 4,
        "use_mem_rope": True,
        "max_position_embeddings": 64,
    },
    blocks=("model.layers",),
    often=True,
)
add(
    "RecurrentGemmaForCausalLM",
    "a linear recurrence whose states are the modules' own",
    _generate,
    {
        **SMALL,
        "num_hidden_layers": 3,
        "lru_width": 32,
        "attention_window_size": 8,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
)
add(
    "SwitchTransformersForConditionalGeneration",
    "experts in a dict of modules",
    _generate,
    {
        **T5,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "num_experts": 4,
    },
)
add(
    "M2M100ForConditionalGeneration",
    "sines that are computed again for longer sequences",
    _generate,
    {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        **CODEC,
        "max_position_embeddings": 4,
        "decoder_start_token_id": 2,
        **SPECIAL,
    },
)
add(
    "XLMWithLMHeadModel",
    "attentions, norms and layers in lists side by side",
    _forward,
    {
        "vocab_size": VOCABULARY,
        "n_words": VOCABULARY,
        "emb_dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 64,
    },
)
add(
    "BertForMaskedLM",
    "a bias under two names; the decoder's weight is the embedding's",
    lambda model: model(ids(), output_attentions=True, output_hidden_states=True),
    {**SMALL, "max_position_embeddings": 32},
)
add(
    "SqueezeBertModel",
    "calls forward of each layer, past its hooks",
    _forward,
    {**SMALL, "embedding_size": 32, "max_position_embeddings": 64},
    often=True,
)


@entry("EncoderDecoderModel", "two models in one, each with a class of its own")
def encoder_decoder() -> Subject:
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel

    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        BertConfig(**SMALL, max_position_embeddings=32),
        BertConfig(**SMALL, max_position_embeddings=32, is_decoder=True, add_cross_attention=True),
    )
    model = EncoderDecoderModel(config)
    return Subject(
        model,
        lambda: model.generate(ids(), decoder_start_token_id=1, pad_token_id=0, **GREEDY),
    )


@entry("RNNs of torch", "weights in one flat storage, aliased by their names", often=True)
def recurrent() -> Subject:
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 16)
            self.lstm = nn.LSTM(16, 16, num_layers=2, bidirectional=True, proj_size=8)
            self.gru = nn.GRU(16, 16, batch_first=True)
            self.cell = nn.LSTMCell(16, 16)
            self.out = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))

        def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.lstm.flatten_parameters()
            x, _ = self.lstm(self.embed(tokens))
            x, last = self.gru(x)
            return self.out(x), *self.cell(last[0])

    model = Recurrent()
    return Subject(model, lambda: model(ids(6, batch=2)))
