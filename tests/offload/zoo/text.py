"""Models of text, and of time series."""

import torch

from tests.offload.zoo.entries import Subject, entry
from tests.offload.zoo.inputs import GREEDY, SMALL, SPECIAL, VOCABULARY, ids


@entry(
    "T5ForConditionalGeneration",
    "one embedding under four names; a bias of the first layer is used by the others",
    often=True,
)
def t5() -> Subject:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("BartForConditionalGeneration", "tied, scaled embeddings; a buffer that is added to logits")
def bart() -> Subject:
    from transformers import BartConfig, BartForConditionalGeneration

    model = BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            decoder_start_token_id=2,
            **SPECIAL,
        )
    )
    return Subject(model, lambda: model.generate(ids(), num_beams=2, **GREEDY))


@entry("XLNetLMHeadModel", "parameters of its own in einsum; memories that are passed on")
def xlnet() -> Subject:
    from transformers import XLNetConfig, XLNetLMHeadModel

    model = XLNetLMHeadModel(
        XLNetConfig(vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=48, mem_len=8)
    )

    def run() -> object:
        first = model(ids(), use_mems=True)
        return first, model(ids(), mems=first.mems, use_mems=True)

    return Subject(model, run)


@entry("FunnelForMaskedLM", "pools its sequence, and keeps positions beside its modules")
def funnel() -> Subject:
    from transformers import FunnelConfig, FunnelForMaskedLM

    model = FunnelForMaskedLM(
        FunnelConfig(
            vocab_size=VOCABULARY,
            block_sizes=[1, 1],
            num_decoder_layers=1,
            d_model=32,
            n_head=4,
            d_head=8,
            d_inner=48,
        )
    )
    return Subject(model, lambda: model(ids(8)))


@entry(
    "ReformerModelWithLMHead",
    "random hashes; reversible layers; a ParameterList that the embedding expands",
    often=True,
)
def reformer() -> Subject:
    from transformers import ReformerConfig, ReformerModelWithLMHead

    model = ReformerModelWithLMHead(
        ReformerConfig(
            vocab_size=VOCABULARY,
            attn_layers=["local", "lsh"],
            hidden_size=32,
            num_attention_heads=4,
            attention_head_size=8,
            feed_forward_size=48,
            axial_pos_shape=[4, 8],
            axial_pos_embds_dim=[16, 16],
            max_position_embeddings=32,
            local_attn_chunk_length=8,
            lsh_attn_chunk_length=8,
            num_buckets=4,
            is_decoder=True,
            hash_seed=1,
        )
    )
    return Subject(model, lambda: model(ids(32)))


@entry("BigBirdForMaskedLM", "attention to random blocks")
def big_bird() -> Subject:
    from transformers import BigBirdConfig, BigBirdForMaskedLM

    model = BigBirdForMaskedLM(
        BigBirdConfig(**SMALL, max_position_embeddings=128, block_size=4, num_random_blocks=1)
    )
    return Subject(model, lambda: model(ids(64)))


@entry("DebertaV2ForMaskedLM", "an embedding's weight, normed, goes into every layer", often=True)
def deberta() -> Subject:
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM

    model = DebertaV2ForMaskedLM(
        DebertaV2Config(
            **SMALL,
            max_position_embeddings=64,
            relative_attention=True,
            position_buckets=8,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            conv_kernel_size=3,
        )
    )
    return Subject(model, lambda: model(ids()))


@entry("LongformerForMaskedLM", "attention in windows, with global tokens of other weights")
def longformer() -> Subject:
    from transformers import LongformerConfig, LongformerForMaskedLM

    model = LongformerForMaskedLM(
        LongformerConfig(**SMALL, max_position_embeddings=64, attention_window=4)
    )

    def run() -> object:
        tokens = ids(16)
        globally = torch.zeros_like(tokens)
        globally[:, 0] = 1
        return model(tokens, global_attention_mask=globally)

    return Subject(model, run)


@entry("MambaForCausalLM", "a state space; its convolution's weight is read beside the call")
def mamba() -> Subject:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=4,
            time_step_rank=4,
            **SPECIAL,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("Mamba2ForCausalLM", "a state space in chunks; bare parameters of the mixer")
def mamba2() -> Subject:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    model = Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            chunk_size=4,
            **SPECIAL,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry(
    "RwkvForCausalLM", "divides weights in place at the first call that is no training", often=True
)
def rwkv() -> Subject:
    from transformers import RwkvConfig, RwkvForCausalLM

    model = RwkvForCausalLM(
        RwkvConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            attention_hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            context_length=32,
            rescale_every=2,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("MixtralForCausalLM", "experts in one tensor, of which a call reads some", often=True)
def mixtral() -> Subject:
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(
        MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("GptOssForCausalLM", "a parameter of the attention that is expanded; experts with biases")
def gpt_oss() -> Subject:
    from transformers import GptOssConfig, GptOssForCausalLM

    model = GptOssForCausalLM(
        GptOssConfig(
            **SMALL,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("DeepseekV3ForCausalLM", "a buffer decides which experts run; latent attention")
def deepseek() -> Subject:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SMALL,
            moe_intermediate_size=16,
            num_key_value_heads=4,
            n_shared_experts=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("GPT2LMHeadModel", "Conv1D; tied; beams reorder the cache")
def gpt2() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4, **SPECIAL)
    )
    return Subject(model, lambda: model.generate(ids(), num_beams=2, **GREEDY))


@entry("AlbertForMaskedLM", "one layer that runs three times", often=True)
def albert() -> Subject:
    from transformers import AlbertConfig, AlbertForMaskedLM

    model = AlbertForMaskedLM(AlbertConfig(**{**SMALL, "num_hidden_layers": 3}, embedding_size=16))
    return Subject(model, lambda: model(ids()))


@entry("CanineModel", "embeddings of hashes of characters")
def canine() -> Subject:
    from transformers import CanineConfig, CanineModel

    small = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    model = CanineModel(
        CanineConfig(**small, num_hash_buckets=64, num_hash_functions=4, max_position_embeddings=64)
    )
    return Subject(model, lambda: model(ids(32)))


@entry("ProphetNetForConditionalGeneration", "streams of n-grams that are embedded by a weight")
def prophetnet() -> Subject:
    from transformers import ProphetNetConfig, ProphetNetForConditionalGeneration

    model = ProphetNetForConditionalGeneration(
        ProphetNetConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_encoder_layers=2,
            num_decoder_layers=2,
            num_encoder_attention_heads=4,
            num_decoder_attention_heads=4,
            max_position_embeddings=64,
            decoder_start_token_id=1,
            **SPECIAL,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry(
    "JambaForCausalLM",
    "layers of two classes, attention and state spaces; experts",
    blocks=("model.layers",),
)
def jamba() -> Subject:
    from transformers import JambaConfig, JambaForCausalLM

    model = JambaForCausalLM(
        JambaConfig(
            **SMALL,
            num_key_value_heads=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            mamba_d_state=4,
            mamba_dt_rank=4,
            use_mamba_kernels=False,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry(
    "Zamba2ForCausalLM",
    "one transformer under several names, with adapters for each",
    blocks=("model.layers",),
    often=True,
)
def zamba2() -> Subject:
    from transformers import Zamba2Config, Zamba2ForCausalLM

    model = Zamba2ForCausalLM(
        Zamba2Config(
            **{**SMALL, "num_hidden_layers": 5},
            num_key_value_heads=4,
            mamba_d_state=8,
            mamba_headdim=8,
            n_mamba_heads=8,
            mamba_ngroups=1,
            chunk_size=4,
            num_mem_blocks=1,
            hybrid_layer_ids=[1, 3],
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba"],
            use_shared_attention_adapter=True,
            adapter_rank=4,
            use_mem_rope=True,
            max_position_embeddings=64,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("RecurrentGemmaForCausalLM", "a linear recurrence whose states are the modules' own")
def recurrent_gemma() -> Subject:
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    model = RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            **{**SMALL, "num_hidden_layers": 3},
            lru_width=32,
            attention_window_size=8,
            num_key_value_heads=1,
            head_dim=8,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("Qwen3NextForCausalLM", "gated delta rules beside attention; a shared expert")
def qwen3_next() -> Subject:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    model = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SMALL,
            num_key_value_heads=2,
            head_dim=8,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            layer_types=["linear_attention", "full_attention"],
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("Gemma3nForCausalLM", "embeddings for each layer; four streams that are mixed")
def gemma3n() -> Subject:
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    model = Gemma3nForCausalLM(
        Gemma3nTextConfig(
            **SMALL,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8,
            num_key_value_heads=2,
            head_dim=8,
            laurel_rank=4,
            num_kv_shared_layers=0,
            activation_sparsity_pattern=[0.5, 0.0],
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=4,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("SwitchTransformersForConditionalGeneration", "experts in a dict of modules")
def switch() -> Subject:
    from transformers import (
        SwitchTransformersConfig,
        SwitchTransformersForConditionalGeneration,
    )

    model = SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_heads=4,
            num_experts=4,
            decoder_start_token_id=0,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("FNetForMaskedLM", "Fourier transforms, no attention")
def fnet() -> Subject:
    from transformers import FNetConfig, FNetForMaskedLM

    small = {k: v for k, v in SMALL.items() if k != "num_attention_heads"}
    model = FNetForMaskedLM(FNetConfig(**small, max_position_embeddings=64))
    return Subject(model, lambda: model(ids()))


@entry("M2M100ForConditionalGeneration", "sines that are computed again for longer sequences")
def m2m() -> Subject:
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    model = M2M100ForConditionalGeneration(
        M2M100Config(
            vocab_size=VOCABULARY,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=4,
            decoder_start_token_id=2,
            **SPECIAL,
        )
    )
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("XLMWithLMHeadModel", "attentions, norms and layers in lists side by side")
def xlm() -> Subject:
    from transformers import XLMConfig, XLMWithLMHeadModel

    model = XLMWithLMHeadModel(
        XLMConfig(
            vocab_size=VOCABULARY,
            n_words=VOCABULARY,
            emb_dim=32,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=64,
        )
    )
    return Subject(model, lambda: model(ids()))


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


@entry("BertForMaskedLM", "a bias under two names; the decoder's weight is the embedding's")
def bert() -> Subject:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(**SMALL, max_position_embeddings=32))
    return Subject(model, lambda: model(ids(), output_attentions=True, output_hidden_states=True))


@entry("InformerForPrediction", "batch norms; attention to sampled keys; samples at the end")
def informer() -> Subject:
    from transformers import InformerConfig, InformerForPrediction

    model = InformerForPrediction(
        InformerConfig(
            prediction_length=4,
            context_length=8,
            lags_sequence=[1, 2],
            num_time_features=1,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            num_parallel_samples=3,
        )
    )

    def run() -> object:
        return model.generate(
            past_values=torch.randn(2, 10),
            past_time_features=torch.randn(2, 10, 1),
            past_observed_mask=torch.ones(2, 10),
            future_time_features=torch.randn(2, 4, 1),
        ).sequences

    return Subject(model, run)


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


@entry("SqueezeBertModel", "calls forward of each layer, past its hooks", often=True)
def squeeze_bert() -> Subject:
    from transformers import SqueezeBertConfig, SqueezeBertModel

    model = SqueezeBertModel(
        SqueezeBertConfig(**SMALL, embedding_size=32, max_position_embeddings=64)
    )
    return Subject(model, lambda: model(ids()))
