"""The check that layers compute the same once their weights have moved names those that fail."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import nn

from swapd_client.vllm.selfcheck import OldMemory, PointerKept, RecordedCalls
from swapd_client.vllm.weight_move import WeightMove

X = torch.ones(1, 8)


class Plain(nn.Module):
    """A layer whose weights may move."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Pointing(Plain):
    """Reads its weights at their first address."""

    def __init__(self) -> None:
        super().__init__()
        memory = (ctypes.c_float * 64).from_address(self.weight.data_ptr())
        self.read: Callable[[], torch.Tensor] = lambda: torch.tensor(memory).view(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.read()


class Random(Plain):
    """As attention without a cache: its output is always different."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(x) @ self.weight


class Cached(Plain):
    """As attention: its output depends on a cache, and may be the same twice."""

    kv_cache = None

    def __init__(self) -> None:
        super().__init__()
        self.found = iter([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.found)


class Chancy(Plain):
    """As kernels that add in any order: the recorded outputs happen to agree, later ones differ."""

    def __init__(self) -> None:
        super().__init__()
        self.off = iter([0.0, 0.0, 0.0, 1e-3, 2e-3, 0.0, 1e-3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + next(self.off)


class InPlace(Plain):
    """As norms that add: writes over its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1.0) @ self.weight


class Never(Plain):
    """As vLLM's heads: never called as a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("call its method")


class Logits(nn.Module):
    """Has no weights: its argument is a module with weights."""

    def forward(self, head: Plain, x: torch.Tensor) -> torch.Tensor:
        return x @ head.weight


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.logits = Never(), Logits()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.logits(self.head, x)
        return out


def moved(
    model: nn.Module, call: Callable[[], object] | None = None
) -> tuple[RecordedCalls, OldMemory]:
    """`model` with its weights elsewhere, and their old place overwritten."""
    calls = RecordedCalls()
    with calls.noted({"": model}):
        model(X) if call is None else call()
    calls.add_linear({"": model})
    calls.settle()
    place = OldMemory(model.parameters())
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    place.overwrite()
    return calls, place


@pytest.mark.parametrize("layer", [Plain, InPlace, Head, Random, Cached, Chancy])
def test_layers_that_read_their_parameters_are_the_same(layer: type[nn.Module]) -> None:
    calls, _ = moved(nn.Sequential(nn.Linear(8, 8, bias=False).requires_grad_(False), layer()))
    calls.compare("thinker")


def test_a_pointer_that_only_an_uncalled_layer_keeps_is_found_too() -> None:
    class Encoder(Pointing):
        in_features = 8

    model = nn.ModuleDict({"language": Plain(), "visual": Encoder()})
    calls, _ = moved(model, lambda: model["language"](X))
    with pytest.raises(PointerKept, match="visual"):
        calls.compare("thinker")


def test_a_layer_that_raises_once_it_has_moved_is_refused() -> None:
    model = nn.Sequential(Plain())
    calls, _ = moved(model)
    model[0].weight = nn.Parameter(torch.empty(3, 3))
    with pytest.raises(PointerKept):
        calls.compare("thinker")


def test_what_has_not_moved_is_not_overwritten() -> None:
    one, two = torch.ones(3), torch.ones(3)
    place = OldMemory([one, two])
    one.data = one.data.clone()
    place.overwrite()
    assert one.tolist() == two.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8]
)
def test_an_old_place_is_overwritten_whatever_was_there(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 25).view(4, 6).to(dtype).t()[1:].data
    address, nbytes = tensor.data_ptr(), 23 * dtype.itemsize
    before = ctypes.string_at(address, nbytes)
    place = OldMemory([tensor])
    tensor.data = tensor.data.clone()
    assert not place.overwrite()
    now = ctypes.string_at(address, nbytes)
    items = range(0, nbytes, dtype.itemsize)
    assert not any(
        now[at : at + dtype.itemsize] == before[at : at + dtype.itemsize] for at in items
    )


def test_memory_that_another_tensor_lies_over_is_left_to_it() -> None:
    tensor = torch.ones(4)
    alias = tensor[1:]
    place = OldMemory([tensor])
    tensor.data = tensor.data.clone()
    assert [id(one) for one in place.overwrite()] == [id(alias)]
    assert alias.tolist() == [1, 1, 1]


def test_the_random_numbers_of_the_process_are_left_alone() -> None:
    model = Plain()
    state = torch.get_rng_state()
    calls, _ = moved(model)
    calls.compare("thinker")
    assert torch.equal(torch.get_rng_state(), state)


def test_more_weights_than_the_files_have_are_warned_of_with_what_a_plan_takes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A plan has one size for all ranks of a stage."""
    WeightMove("thinker.tp0", keep_place=False).warn_of_more(50 << 20, 58 << 20)
    assert caplog.messages[-1].endswith("in place of the model's folder, with thinker=58MiB")
