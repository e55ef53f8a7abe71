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


def test_one_that_the_method_of_a_layer_keeps_is_found() -> None:
    layer = Layer()
    layer.quant_method.w13 = SimpleNamespace(storage=Storage(numbers()))
    assert list(Candidates({"": layer}).weights()) == ["quant_method.w13.storage.data"]


def test_scales_of_blocks_are_no_locks() -> None:
    layer: Any = Layer()
    layer.blockscale_swizzled, layer.locks = numbers(), numbers()
    assert list(Candidates({"": layer}).weights()) == ["blockscale_swizzled"]


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


def unlike_a_weight() -> dict[str, Callable[[Layer], None]]:
    def of_no_layer(layer: Layer) -> None:
        layer.quant_method = None
        layer.table = numbers()

    def small(layer: Layer) -> None:
        layer.scale = torch.arange(16.0)

    def room(layer: Layer) -> None:
        layer.out = torch.zeros(WIDE)

    def workspace(layer: Layer) -> None:
        layer.workspace = numbers()

    def several_workspaces(layer: Any) -> None:
        layer.workspaces = [numbers()]

    def an_adapters_tensors(layer: Any) -> None:
        layer.quant_method.lora_a_stacked = (numbers(), numbers())

    def of_the_process(layer: Any) -> None:
        layer.stream = torch.utils.data.TensorDataset(numbers())

    kinds = (of_no_layer, small, room, workspace, several_workspaces, an_adapters_tensors)
    return {one.__name__: one for one in (*kinds, of_the_process)}


@pytest.mark.parametrize("what", unlike_a_weight())
def test_what_is_no_weight_stays(what: str) -> None:
    layer = Layer()
    unlike_a_weight()[what](layer)
    assert not Candidates({"": layer}).weights()


def test_what_a_forward_writes_to_stays() -> None:
    layer = Layer()
    layer.packed, layer.written = numbers(), numbers()
    found = Candidates({"": layer})
    layer.written[7] = -1
    assert list(found.weights()) == ["packed"]


def test_a_cycle_of_objects_ends() -> None:
    layer = Layer()
    layer.quant_method.layer = layer
    layer.quant_method.itself = layer.quant_method
    layer.quant_method.kept = [layer.quant_method, numbers()]
    assert len(Candidates({"": layer}).weights()) == 1


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


def test_what_was_left_is_named_largest_first() -> None:
    model: Any = nn.Module()
    model.tables = [numbers(), torch.arange(2.0 * WIDE), torch.ones(3)]
    named = kernel_tensors.largest(Candidates({"thinker": model}).found, 5)
    assert [one.name for one in named] == ["thinker.tables.1", "thinker.tables.0"]


class Linear(Layer):
    """As vLLM's linear layers, 64 KiB."""

    params_dtype = torch.float32
    input_size_per_partition = output_size = 128

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(nbytes, dtype=torch.uint8), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(128))


WHOLE = 64 << 10


@pytest.mark.parametrize(
    ("nbytes", "kept", "packed"),
    [
        pytest.param(WHOLE, None, 0, id="as it was"),
        pytest.param(WHOLE // 16, None, 0, id="in 2 bits"),
        pytest.param(0, None, WHOLE, id="nowhere"),
        pytest.param(0, torch.empty(WHOLE, dtype=torch.uint8), 0, id="in an object"),
    ],
)
def test_a_weight_that_nothing_can_see_is_counted_by_the_widths_of_its_layer(
    nbytes: int, kept: torch.Tensor | None, packed: int
) -> None:
    layer = Linear(nbytes)
    layer.quant_method.kept = kept
    models = {"": nn.Sequential(layer, nn.Linear(128, 128), Layer())}
    assert kernel_tensors.packed_bytes(models, kernel_tensors.found_in(models)) == packed
