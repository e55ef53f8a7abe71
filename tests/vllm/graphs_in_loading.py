"""Registers a model that captures a CUDA graph while it loads, as Qwen3-Omni's code2wav does."""

from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM


class CapturingQwen2(Qwen2ForCausalLM):  # type: ignore[misc]
    """Only the model knows where its graphs are."""

    def load_weights(self, weights: Any) -> Any:
        self.graphs = {8: [object.__new__(torch.cuda.CUDAGraph)]}
        return super().load_weights(weights)


ModelRegistry.register_model("CapturingQwen2", CapturingQwen2)
