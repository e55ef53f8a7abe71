"""Weights that are not parameters: which are found, and which may be components."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client.vllm import kernel_tensors
from swapd_client.vllm.kernel_tensors import Candidates

WIDE = kernel_tensors.LARGE // 4


def numbers() -> torch.Tensor:
    """A large tensor of different values."""
    return torch.arange(WIDE, dtype=torch.float32)


class Layer(nn.Module):
    """As vLLM's layers: another object handles its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method: Any = SimpleNamespace()


@dataclass
class Storage:
    data: torch.Tensor


class Slotted:
    __slots__ = ("empty", "packed")

    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed


def in_a_closure(packed: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda x, scale=1.0: x * packed * scale


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "an attribute": lambda packed: packed,
    "a list": lambda packed: [None, packed],
    "a dict": lambda packed: {8: packed},
    "an object that wraps it": lambda packed: SimpleNamespace(storage=Storage(packed)),
    "an object with slots": Slotted,
    "a closure": in_a_closure,
    "a default": lambda packed: lambda x, packed=packed: x * packed,
    "a parameter that is nobody's": lambda packed: (nn.Parameter(packed, requires_grad=False),),
}


@pytest.mark.parametrize("where", KEPT)
def test_a_weight_is_found_wherever_a_layer_keeps_it(where: str) -> None:
    layer = Layer()
    packed = numbers()
    layer.kept = KEPT[where](packed)
    found = Candidates({"": nn.ModuleDict({"proj": layer})}).weights()
    ((name, tensor),) = found.items()
    assert name.startswith("proj.kept")
    assert tensor.data_ptr() == packed.data_ptr()


class Attention(nn.Module):
    """As MLA's: it has a cache, and products of weights."""

    kv_cache = None

    def __init__(self) -> None:
        super().__init__()
        self.impl = SimpleNamespace(_w_uk_packed=numbers(), positions=numbers())

    def process_weights_after_loading(self) -> None:
        """vLLM calls this."""


def test_attention_keeps_weights_by_their_names_alone() -> None:
    assert list(Candidates({"": Attention()}).weights()) == ["impl._w_uk_packed"]


def test_what_is_no_weight_stays() -> None:
    layer: Any = Layer()
    layer.scale = torch.arange(16.0)
    layer.out = torch.zeros(WIDE)
    layer.workspace, layer.workspaces = numbers(), [numbers()]
    layer.quant_method.lora_a_stacked = (numbers(), numbers())
    layer.stream = torch.utils.data.TensorDataset(numbers())
    layer.blockscale_swizzled, layer.locks = numbers(), numbers()
    of_no_method: Any = nn.Module()
    of_no_method.table = numbers()
    found = Candidates({"": nn.ModuleDict({"a": layer, "b": of_no_method})}).weights()
    assert list(found) == ["a.blockscale_swizzled"]


def test_what_a_forward_writes_to_stays() -> None:
    layer = Layer()
    layer.packed, layer.written = numbers(), numbers()
    found = Candidates({"": layer})
    layer.written[7] = -1
    assert list(found.weights()) == ["packed"]


def test_every_view_of_a_parameter_is_an_alias_whoever_keeps_it() -> None:
    model = nn.Linear(4, 4, bias=False).requires_grad_(False)
    with torch.inference_mode():
        kept = SimpleNamespace(views=[model.weight[1:], model.weight.view(torch.int32)])
    found = kernel_tensors.aliases_of(list(model.parameters()))
    assert {id(one) for one in found} == {id(one) for one in kept.views}


class Rude(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError


def test_tensors_of_others_in_the_process_are_not_asked() -> None:
    model = nn.Linear(4, 4, bias=False).requires_grad_(False)
    others = nn.LazyLinear(3), torch.ones(3).as_subclass(Rude)
    assert kernel_tensors.aliases_of(list(model.parameters())) == []
    assert others
