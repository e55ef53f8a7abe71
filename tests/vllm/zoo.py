"""Tiny checkpoints of real architectures, each with random weights.

The configuration classes are the real ones; they have six layers, and at most 512 tokens.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WORDS = 512

#: The tokenizer's first words; then come single characters, then numbers.
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>", "<audio>", "<begin>", "<end>", "<video>")
PAD, BOS, EOS, _, IMAGE, AUDIO, BEGIN, END, VIDEO = range(len(SPECIAL))

#: Options of most of them. Weights are large, so that the output depends on the input.
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def write_all(folder: str) -> None:
    """Write each into a folder in `folder`, by its name."""
    import torch

    for number, (name, write) in enumerate(CHECKPOINTS.items()):
        torch.manual_seed(number)
        made = Path(folder, name)
        made.mkdir(parents=True)
        write(made)


def model(config: str, architecture: str, **more: Any) -> Callable[[Path], None]:
    """Writes one of transformers' models, by the names of its classes."""

    def write(folder: Path) -> None:
        import torch
        import transformers

        made_of = getattr(transformers, config)(**{**SIZES, **more})
        made = getattr(transformers, architecture)(made_of).to(torch.bfloat16)
        made.save_pretrained(folder)

    return write


# --- models that see and hear --------------------------------------------------------------


def write_qwen2_vl(folder: Path) -> None:
    text = {**SIZES, "rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2}
    model(
        "Qwen2VLConfig",
        "Qwen2VLForConditionalGeneration",
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )(folder)
    write_tokenizer(folder, image_token="<image>", video_token="<video>")
    pictures = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 28 * 28,
        "max_pixels": 112 * 112,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))


def write_qwen2_audio(folder: Path) -> None:
    audio = {
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 16,
        "max_source_positions": 1500,
    }
    model(
        "Qwen2AudioConfig",
        "Qwen2AudioForConditionalGeneration",
        text_config={**SIZES, "model_type": "qwen2"},
        audio_config=audio,
        audio_token_index=AUDIO,
    )(folder)
    # as in the released files; vLLM reads it
    rename(folder, "language_model.model.model.", "language_model.model.")
    write_tokenizer(folder, audio_token="<audio>", audio_bos="<begin>", audio_eos="<end>")
    sounds = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "Qwen2AudioProcessor",
        "feature_size": 16,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(sounds))


def rename(folder: Path, before: str, after: str) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {name.replace(before, after): one for name, one in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def write_tokenizer(folder: Path, **named: str) -> None:
    """One that knows single characters, and numbers as words. `named`: its tokens of a kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet]
    words += [f"w{number}" for number in range(len(words), WORDS)]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL[4:]),
        **named,
    ).save_pretrained(folder)


# --- quantised models ----------------------------------------------------------------------


def packed(method: str, **config: Any) -> Callable[[Path], None]:
    """Writes a Llama whose layers have weights of 4 bits, 8 to an int32, in groups of 32."""

    def write(folder: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        model("LlamaConfig", "LlamaForCausalLM")(folder)
        file, group = folder / "model.safetensors", 32
        tensors = {}
        for name, weight in load_file(file).items():
            if not name.endswith("_proj.weight"):
                tensors[name] = weight
                continue
            to, of = weight.shape
            at = name.removesuffix(".weight")
            shape = (of // 8, to) if method == "gptq" else (of, to // 8)
            tensors[f"{at}.qweight"] = _any_int32(shape)
            tensors[f"{at}.qzeros"] = _any_int32((of // group, to // 8))
            tensors[f"{at}.scales"] = torch.rand(of // group, to).bfloat16() * 0.06
            if method == "gptq":
                tensors[f"{at}.g_idx"] = torch.arange(of, dtype=torch.int32) // group
        save_file(tensors, file, metadata={"format": "pt"})
        said = json.loads((folder / "config.json").read_text())
        said["quantization_config"] = {
            "quant_method": method,
            "bits": 4,
            "group_size": group,
            **config,
        }
        (folder / "config.json").write_text(json.dumps(said))

    return write


def _any_int32(shape: tuple[int, int]) -> Any:
    import torch

    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


# --- adapters ------------------------------------------------------------------------------


def write_adapter(folder: Path, sizes: Mapping[str, int] = SIZES) -> None:
    """A LoRA for a model of these sizes, of rank 8, on its attention."""
    import torch
    from safetensors.torch import save_file

    rank, hidden = 8, sizes["hidden_size"]
    width = {"q_proj": hidden, "v_proj": sizes["num_key_value_heads"] * sizes["head_dim"]}
    tensors = {}
    for layer in range(sizes["num_hidden_layers"]):
        for name, out in width.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, hidden) * 0.5
            tensors[f"{at}.lora_B.weight"] = torch.randn(out, rank) * 0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(width)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


# --- drafts --------------------------------------------------------------------------------


def write_eagle(folder: Path) -> None:
    """An EAGLE head for `llama`: a layer, and a projection of a token and the last hidden state."""
    import torch
    from safetensors.torch import load_file, save_file

    model("LlamaConfig", "LlamaForCausalLM", num_hidden_layers=1)(folder)
    file, hidden = folder / "model.safetensors", SIZES["hidden_size"]
    layer = {
        name.removeprefix("model."): one
        for name, one in load_file(file).items()
        if ".layers." in name and "layers.0.input_layernorm" not in name
    }
    layer["fc.weight"] = (torch.randn(hidden, 2 * hidden) * 0.2).bfloat16()
    save_file(layer, file, metadata={"format": "pt"})


def with_tokenizer(write: Callable[[Path], None]) -> Callable[[Path], None]:
    def write_both(folder: Path) -> None:
        write(folder)
        write_tokenizer(folder)

    return write_both


# --- all of them ---------------------------------------------------------------------------

#: DeepSeek's experts, and layers that keep a latent instead of keys and values.
LATENT: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GEMMA = {"sliding_window": 16, "query_pre_attn_scalar": 32, "initializer_range": 0.05}
_BERT = {"type_vocab_size": 2, "hidden_act": "gelu"}

CHECKPOINTS: Mapping[str, Callable[[Path], None]] = {
    "llama": model("LlamaConfig", "LlamaForCausalLM"),
    "llama-short": model("LlamaConfig", "LlamaForCausalLM", num_hidden_layers=2),
    "llama-eagle": write_eagle,
    "adapter-1": write_adapter,
    "adapter-2": write_adapter,
    "words": with_tokenizer(model("LlamaConfig", "LlamaForCausalLM")),
    "qwen3": with_tokenizer(model("Qwen3Config", "Qwen3ForCausalLM", tie_word_embeddings=True)),
    "qwen3-moe": model("Qwen3MoeConfig", "Qwen3MoeForCausalLM", **_EXPERTS),
    "gemma2": model("Gemma2Config", "Gemma2ForCausalLM", **_GEMMA, tie_word_embeddings=True),
    "gemma3": model("Gemma3TextConfig", "Gemma3ForCausalLM", **_GEMMA, tie_word_embeddings=True),
    "opt": model("OPTConfig", "OPTForCausalLM", ffn_dim=256, word_embed_proj_dim=128, init_std=0.2),
    "deepseek": model(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        **LATENT,
        head_dim=64,
    ),
    "llama-awq": packed("awq", zero_point=True, version="gemm"),
    "llama-gptq": packed("gptq", desc_act=False, sym=True),
    "qwen2-vl": write_qwen2_vl,
    "qwen2-audio": write_qwen2_audio,
    "bert": with_tokenizer(model("BertConfig", "BertModel", **_BERT)),
    "bert-classifies": model("BertConfig", "BertForSequenceClassification", **_BERT, num_labels=3),
    "qwen3-classifies": model("Qwen3Config", "Qwen3ForSequenceClassification", num_labels=3),
}
