"""Tiny checkpoints of a real architecture (Qwen2), each with random weights of its own.

`python -m tests.vllm.models FOLDER [NAME ...]` writes them. They differ in weights and in depth, so
that a mix-up shows; one has tied embeddings.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

HEAD = 64
KV_HEADS = 2
VOCABULARY = 8192


class Model(NamedTuple):
    seed: int
    layers: int
    tied: bool = False
    hidden: int = 512
    inner: int = 1536


MODELS = {
    "thinker": Model(1, 8, tied=True),  # 54 MiB
    "talker": Model(2, 6),  # 51 MiB
    "code2wav": Model(3, 4),  # 39 MiB
}


#: Models with enough layers for several parts of 16 chunks of 2 MiB.
DEEP = {
    "deep": Model(6, 24, tied=True),  # 147 MiB
    "less-deep": Model(7, 18, tied=True),  # 112 MiB
}
#: Another one, for a pipeline of three.
THIRD = {"third": Model(8, 21, tied=True)}  # 130 MiB
#: The last stage of a pipeline that streams sounds.
WAVE = {"wave": Model(9, 2, tied=True)}  # 20 MiB

#: A model for measurements that grow with the weights.
LARGE = {
    "large": Model(4, 10, hidden=1024, inner=4096),  # 313 MiB
    "larger": Model(5, 10, hidden=1024, inner=4096),
}
#: One whose weights take longer to read than vLLM takes to build it.
HEAVY = {"heavy": Model(10, 12, hidden=2048, inner=5632)}  # 1.1 GiB


def write_all(folder: str, *names: str) -> None:
    """Write those of `MODELS`, or the named ones of all models."""
    for name in names or MODELS:
        write(Path(folder, name), {**MODELS, **DEEP, **THIRD, **WAVE, **LARGE, **HEAVY}[name])


def write(folder: Path, model: Model) -> None:
    """Write a folder as `save_pretrained` does, without the tokenizer."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    save_file(tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(model), indent=2))


def config(model: Model) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.hidden // HEAD,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": model.tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def tensors(model: Model) -> dict[str, Any]:
    """All weights, with values so large that the output depends on the input."""
    import torch

    generator = torch.Generator().manual_seed(model.seed)

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.2).bfloat16()

    hidden, inner, kv = model.hidden, model.inner, KV_HEADS * HEAD
    made = {"model.embed_tokens.weight": noise(VOCABULARY, hidden)}
    for number in range(model.layers):
        layer = f"model.layers.{number}."
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            made[f"{layer}{name}.weight"] = noise(rows, columns)
            if name[10:] in ("q_proj", "k_proj", "v_proj"):
                made[f"{layer}{name}.bias"] = noise(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{layer}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    made["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    if not model.tied:
        made["lm_head.weight"] = noise(VOCABULARY, hidden)
    return made


def write_int8(folder: Path, model: Model, *, symmetric: bool) -> None:
    """`write`, with its linear layers as 8-bit integers (W8A8, compressed-tensors).

    Their inputs are quantised at run time, with a zero point unless `symmetric`.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    made = {}
    for name, tensor in tensors(model).items():
        if not name.endswith("_proj.weight"):
            made[name] = tensor
            continue
        scale = tensor.float().abs().amax(1, keepdim=True) / 127
        made[name] = (tensor.float() / scale).round().char()
        made[f"{name}_scale"] = scale
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    by_channel = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    by_token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": by_channel,
        "input_activations": {**by_token, "symmetric": symmetric},
    }
    quantised = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    said = {**config(model), "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(said, indent=2))


def write_fp8(folder: Path, model: Model) -> None:
    """`write`, with its linear layers as 8-bit floats (vLLM's "fp8"), a scale of each, and one of
    its input."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    kind, made = torch.float8_e4m3fn, {}
    for name, tensor in tensors(model).items():
        if not name.endswith("_proj.weight"):
            made[name] = tensor
            continue
        scale = tensor.float().abs().amax() / torch.finfo(kind).max
        made[name] = (tensor.float() / scale).to(kind)
        made[f"{name}_scale"] = scale
        made[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.1)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    quantised = {"quant_method": "fp8", "activation_scheme": "static"}
    said = {**config(model), "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(said, indent=2))


if __name__ == "__main__":
    write_all(*sys.argv[1:])
