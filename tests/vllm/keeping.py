"""Models whose kernels keep their weights elsewhere than in parameters. Importing registers them.

Each is Qwen2, with another method for one kind of its linear layers, as quantisation uses them.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import linear
from vllm import ModelRegistry
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM


class Method(LinearMethodBase):  # type: ignore[misc]
    """Wraps the method of one layer, which has made the weights."""

    def create_weights(self, *given: Any, **named: Any) -> None:
        raise NotImplementedError("the layer has its weights")


class Wraps(Method):
    """Has the weights in an object, as Triton's kernels for experts do."""

    def process_weights_after_loading(self, layer: Any) -> None:
        self.weight = SimpleNamespace(storage=SimpleNamespace(data=layer.weight.data))
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return linear(x, self.weight.storage.data, bias)


class Points(Method):
    """Has the address of the weights, as a handle of oneDNN's has that of a scale."""

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight
        self.memory = (ctypes.c_int16 * weight.numel()).from_address(weight.data_ptr())
        self.shape = weight.shape

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        whole = torch.frombuffer(bytearray(self.memory), dtype=torch.bfloat16)
        return linear(x, whole.view(self.shape), bias)


class Hides(Method):
    """Has a hidden copy of the weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        self.weight = memoryview(layer.weight.data.view(torch.uint8).numpy().tobytes())
        self.shape, self.dtype = layer.weight.shape, layer.weight.dtype
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        whole = torch.frombuffer(bytearray(self.weight), dtype=self.dtype)
        return linear(x, whole.view(self.shape), bias)


class KeepingQwen2(Qwen2ForCausalLM):  # type: ignore[misc]
    """Its MLPs' weights are handled by `method`."""

    method: type[Method]

    def load_weights(self, weights: Any) -> Any:
        for layer in self.model.layers:
            if not isinstance(layer.mlp.down_proj.quant_method, self.method):
                layer.mlp.down_proj.quant_method = self.method()
        return super().load_weights(weights)


class WrappingQwen2(KeepingQwen2):
    method = Wraps


class PointingQwen2(KeepingQwen2):
    method = Points


class HidingQwen2(KeepingQwen2):
    method = Hides


class LargerQwen2(Qwen2ForCausalLM):  # type: ignore[misc]
    """Has a second embedding, as Qwen2.5-Omni's talker has the thinker's."""

    def load_weights(self, weights: Any) -> Any:
        loaded = super().load_weights(weights)
        tensor = self.model.embed_tokens.weight
        rows, columns = tensor.shape
        self.thinker_embedding = torch.nn.Embedding(rows, columns, _weight=tensor.clone())
        return {*loaded, "thinker_embedding.weight"}


for kind in (WrappingQwen2, PointingQwen2, HidingQwen2, LargerQwen2):
    ModelRegistry.register_model(kind.__name__, kind)
