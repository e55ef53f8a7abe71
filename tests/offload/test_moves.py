"""`.to()` and its kind while weights are absent: done if it changes nothing, else refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client, NotWhileAttached
from tests.offload.test_state_dict import Block
from tests.offload.twins import Lent, same

NOTHING: dict[str, Callable[[Any], Any]] = {
    "cpu": lambda m: m.cpu(),
    "to cpu": lambda m: m.to("cpu"),
    "to device": lambda m: m.to(torch.device("cpu"), non_blocking=True),
    "float": lambda m: m.float(),
    "to float32": lambda m: m.to(torch.float32),
    "to both": lambda m: m.to("cpu", torch.float32),
    "type": lambda m: m.type(torch.float32),
    "to another tensor's": lambda m: m.to(torch.ones(1)),
    "requires_grad_": lambda m: m.requires_grad_(True),
    "train": lambda m: m.train(),
    "contiguous": lambda m: m.to(memory_format=torch.contiguous_format),
}
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "half": (lambda m: m.half(), "be cast from torch.float32 to torch.float16"),
    "double": (lambda m: m.double(), "be cast"),
    "bfloat16": (lambda m: m.bfloat16(), "be cast"),
    "to": (lambda m: m.to(torch.float16), "be cast"),
    "type": (lambda m: m.type(torch.float64), "be cast"),
    "meta": (lambda m: m.to("meta"), "be moved from cpu to meta"),
    "to_empty": (lambda m: m.to_empty(device="cpu"), "be replaced"),
    "share_memory": (lambda m: m.share_memory(), "be moved to shared memory"),
    "channels_last": (lambda m: m.to(memory_format=torch.channels_last), "be replaced"),
    "any": (lambda m: m._apply(lambda t: t * 2), "be replaced"),
}


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(2, 2)
        self.inner = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


@pytest.mark.parametrize("which", NOTHING)
def test_what_changes_nothing_works_while_it_is_out(client: Client, which: str) -> None:
    lent = Lent(client, Pictures)
    parameters = list(lent.module.parameters())
    addresses = [p.data_ptr() for p in parameters]
    assert NOTHING[which](lent.module) is lent.module
    assert lent.is_out()
    found = list(lent.module.parameters())
    assert all(mine is its for mine, its in zip(found, parameters, strict=True))
    assert [p.data_ptr() for p in found] == addresses
    assert same(lent.module.state_dict(), NOTHING[which](lent.twin).state_dict())


@pytest.mark.parametrize("which", CHANGES)
@pytest.mark.parametrize("inside", [False, True])
def test_what_changes_something_is_refused_and_has_changed_nothing(
    client: Client, which: str, inside: bool
) -> None:
    lent = Lent(client, Pictures)
    change, what = CHANGES[which]
    whole = lent.module.get_submodule("inner") if inside else lent.module
    with pytest.raises(NotWhileAttached, match=what) as refused:
        change(whole)
    assert "part of 'm'" in str(refused.value)
    assert "detach() first" in str(refused.value)
    assert lent.is_out()
    assert same(lent.module.state_dict(), lent.twin.state_dict())
    buffers: Any = lent.module.buffers()
    assert not any(b.is_shared() for b in buffers)


def test_the_first_that_cannot_is_named(client: Client) -> None:
    lent = Lent(client, Pictures)
    with pytest.raises(NotWhileAttached, match=r"^'plain\.weight' cannot"):
        lent.module.half()
    with pytest.raises(NotWhileAttached, match=r"^'0\.weight' cannot"):
        lent.module.get_submodule("inner").half()


def test_a_change_that_concerns_no_weight_of_swapd_s_is_made(client: Client) -> None:
    """Of private buffers, and of parameters added since."""
    lent = Lent(client, lambda: nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.BatchNorm1d(2).half()))
    lent.module.register_buffer("table", torch.ones(2, dtype=torch.float64))
    lent.module.get_submodule("0").register_parameter(
        "more", nn.Parameter(torch.ones(2, dtype=torch.float64))
    )
    module: Any = lent.module
    module._apply(lambda t: t.float() if t.dtype == torch.float64 else t)
    assert lent.module.get_buffer("table").dtype is torch.float32
    assert lent.module.get_parameter("0.more").dtype is torch.float32
    assert lent.module.get_parameter("0.weight").dtype is torch.bfloat16
    assert lent.is_out()


@pytest.mark.parametrize("end", [Lent.end, lambda lent: lent.client.close()])
def test_what_is_private_again_may_be_cast(client: Client, end: Callable[[Lent], None]) -> None:
    lent = Lent(client, Block)
    end(lent)
    lent.module.half()
    assert same(lent.module.state_dict(), lent.twin.half().state_dict())


def test_a_move_is_tried_on_like_weights_once_whatever_the_depth(client: Client) -> None:
    """Each level of the model asked again for all below it: seconds for thousands of modules."""
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(8):
        model = nn.Sequential(model, nn.Linear(2, 2))
    tried: list[torch.Tensor] = []

    def nothing(tensor: torch.Tensor) -> torch.Tensor:
        tried.append(tensor)
        return tensor

    with client.attach({"dit": model}):
        for _ in range(2):
            model._apply(nothing)  # type: ignore[no-untyped-call]
    assert sorted(tuple(t.shape) for t in tried) == [(2,), (2,), (2, 2), (2, 2)]
