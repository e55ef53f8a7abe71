"""Models whose weights are wrapper tensors, or packed in objects without tensors."""

from typing import Any

import torch
from torch import nn

from tests.offload.zoo.entries import Subject, entry
from tests.offload.zoo.inputs import GREEDY, SMALL, ids


def _llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **more}, num_key_value_heads=2)).eval()


def _torchao(config: Any, model: Any) -> Subject:
    from torchao.quantization import quantize_

    quantize_(model, config)
    return Subject(model, lambda: model.generate(ids(), **GREEDY))


@entry("Llama of int8 weights (torchao)", "weights that wrap integers and scales", often=True)
def int8_weights() -> Subject:
    from torchao.quantization import Int8WeightOnlyConfig

    return _torchao(Int8WeightOnlyConfig(), _llama())


@entry("Llama of float8 weights (torchao)", "weights of a type of 8 bits, wrapped")
def float8_weights() -> Subject:
    from torchao.quantization import Float8WeightOnlyConfig

    return _torchao(Float8WeightOnlyConfig(), _llama(hidden_size=64, intermediate_size=64))


@entry("Llama of intx weights (torchao)", "groups of 4 bits, each with a scale and a zero")
def intx_weights() -> Subject:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    config = IntxWeightOnlyConfig(
        weight_dtype=torch.int4,  # type: ignore[attr-defined]
        granularity=PerGroup(32),
    )
    return _torchao(config, _llama(hidden_size=64, intermediate_size=64))


def _packed(model: Any, kind: type[nn.Module]) -> Any:
    quantize: Any = torch.ao.quantization.quantize_dynamic
    return quantize(model, {kind}, dtype=torch.qint8)


@entry(
    "BERT of dynamic int8 (torch.ao)",
    "packed weights that are no tensors of the module",
    told="packed",
)
def packed_bert() -> Subject:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**SMALL, max_position_embeddings=32)).eval()
    packed = _packed(model, nn.Linear)
    return Subject(packed, lambda: packed(ids()))


@entry("SD3Transformer2DModel of int8 weights (torchao)", "some Linears wrapped, others not")
def partly_int8() -> Subject:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from tests.offload.zoo.diffusion import sd3

    model, run, _ = sd3()
    quantize_(
        model,
        Int8WeightOnlyConfig(),
        filter_fn=lambda module, name: isinstance(module, nn.Linear) and "attn" in name,
    )
    return Subject(model, run)


@entry(
    "Parameters of odd types and strides",
    "complex, bfloat16, integers, transposed, a column of a larger one",
)
def odd_types() -> Subject:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(16, dtype=torch.complex64))
            self.matrix = nn.Parameter(torch.randn(16, 16, dtype=torch.bfloat16))
            self.codes = nn.Parameter(torch.randint(0, 9, (16,)), requires_grad=False)
            self.register_buffer("mask", torch.rand(16) > 0.5, persistent=False)
            self.transposed = nn.Parameter(torch.randn(8, 16).t())
            self.column = nn.Parameter(torch.randn(16, 4)[:, 1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            waves = torch.fft.fft(x) * self.phase
            y: torch.Tensor = (waves.real.to(torch.bfloat16) @ self.matrix).float()[:, self.codes]
            masked: torch.Tensor = torch.where(self.mask, y * self.column, 0)  # type: ignore[arg-type]
            return masked @ self.transposed

    model = Odd()
    return Subject(model, lambda: model(torch.randn(2, 16)))
