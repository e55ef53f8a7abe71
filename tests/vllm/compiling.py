"""A model that compiles a part of itself at its first call, as code predictors do. Importing this
registers it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm import ModelRegistry
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM


def negating(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend of dynamo; its code computes other numbers than the code that it is made from."""
    return lambda *args: [-one for one in graph(*args)]


class Predictor(nn.Module):
    """Without weights, which no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: Callable[..., torch.Tensor] | None = None

    def shift(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.roll(1, -1) / 2

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.compiled is None:
            self.compiled = torch.compile(self.shift, backend=negating, dynamic=True)
        return hidden + self.compiled(hidden)


class CompilingQwen2(Qwen2ForCausalLM):  # type: ignore[misc]
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.predictor = Predictor()

    def forward(self, *args: Any, **given: Any) -> Any:
        return self.predictor(super().forward(*args, **given))


ModelRegistry.register_model("CompilingQwen2", CompilingQwen2)
