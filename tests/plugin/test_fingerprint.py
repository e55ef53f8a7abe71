"""The fingerprint of a model is that of everything but the bytes of its parameters."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Linear, Module, Parameter

from swapd_client.vllm.fingerprint import UnhashableState, fingerprint


class Layer(Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(4, 4))
        self.register_buffer("table", torch.arange(4.0))
        self.kept: Any = SimpleNamespace(scale=1.0, names={"a", "b"}, inner=[{"row": None}])


def model() -> Module:
    return torch.nn.Sequential(Layer(), Linear(4, 4))


def of(made: Module) -> str:
    return fingerprint({"": made})


def test_equal_models_have_one_whatever_their_weights_are() -> None:
    one, other = model(), model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7)
    assert of(one) == of(other) == of(copy.deepcopy(one))


def in_a_closure(value: float) -> Callable[[], float]:
    return lambda: value


CHANGES: dict[str, Callable[[Any], object]] = {
    "a buffer": lambda made: made[0].table.add_(1),
    "a number": lambda made: setattr(made[0].kept, "scale", 2.0),
    "the kind of a number": lambda made: setattr(made[0].kept, "scale", 1),
    "a set": lambda made: made[0].kept.names.add("c"),
    "a copy of a weight": lambda made: made[0].kept.inner[0].update(row=made[0].weight[0].clone()),
    "a view of a weight": lambda made: made[0].kept.inner[0].update(row=made[0].weight[0]),
    "a closure": lambda made: setattr(made[0], "call", in_a_closure(2.0)),
    "a partial": lambda made: setattr(made[0], "call", partial(print, 2.0)),
    "a hidden module": lambda made: setattr(made[0], "hidden", (Linear(4, 4),)),
    "an attribute of a weight": lambda made: setattr(made[0].weight, "scale", 2.0),
    "a shape": lambda made: setattr(made[0], "weight", Parameter(torch.ones(4, 5))),
    "a dtype": lambda made: made[1].half(),
    "a tied weight": lambda made: setattr(made[1], "weight", made[0].weight),
    "a class": lambda made: made.append(Linear(4, 4)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_any_other_difference_shows(change: Callable[[Any], object]) -> None:
    one, other = model(), model()
    with torch.no_grad():
        change(other)
    assert of(one) != of(other)


def test_the_value_in_a_closure_shows() -> None:
    one, other = Layer(), Layer()
    one.kept, other.kept = in_a_closure(1.0), in_a_closure(2.0)
    assert of(one) != of(other)


def test_a_tensor_that_wraps_others_has_none() -> None:
    made: Any = model()
    made[0].kept = torch.ones(2, requires_grad=True) * 2  # the result of a computation
    with pytest.raises(UnhashableState):
        of(made)
