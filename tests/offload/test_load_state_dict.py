"""`load_state_dict` into absent weights: as torch does it, and all at once."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client, NotWhileAttached
from swapd_client.offload import state_dict
from swapd_client.offload.guards import guard
from swapd_client.offload.weights import ComponentWeights
from tests.offload.modules import evict
from tests.offload.test_state_dict import Block, Tied
from tests.offload.twins import Lent, same

kinds = pytest.mark.parametrize("mutable", [False, True], ids=["clean", "mutable"])
forms = pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])


def others(module: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict with other values."""
    torch.manual_seed(99)
    return {
        name: torch.rand_like(value) if value.is_floating_point() else value + 3
        for name, value in module.state_dict().items()
    }


def record_updates(lent: Lent) -> list[Any]:
    """Record the new values of its weights, one entry for each update."""
    given: list[Any] = []
    change = lent.weights.change

    def recorded(values: Any, changes: Any) -> None:
        given.append([tensor for tensor, _ in values])
        change(values, changes)

    lent.weights.change = recorded  # type: ignore[method-assign]
    return given


@kinds
@forms
def test_the_new_values_are_there_from_then_on(client: Client, mutable: bool, assign: bool) -> None:
    lent = Lent(client, lambda: Block().eval(), mutable=mutable)
    parameters = dict(lent.module.named_parameters())
    addresses = {name: p.data_ptr() for name, p in parameters.items()}
    new = others(lent.twin)
    given = record_updates(lent)
    assert lent.module.load_state_dict(new, assign=assign) == lent.twin.load_state_dict(new)
    assert len(given) == 1
    assert len(given[0]) == len(parameters)
    x = torch.randn(3, 16)
    for _ in range(3):
        assert same(dict(lent.module.state_dict()), new)
        assert torch.equal(lent.run(x), lent.twin(x))
    for name, parameter in lent.module.named_parameters():
        assert parameter is parameters[name], "who knows the parameter knows it still"
        assert parameter.data_ptr() == addresses[name]
        assert parameter.requires_grad


@kinds
def test_what_is_given_is_not_kept(client: Client, mutable: bool) -> None:
    lent = Lent(client, Block, mutable=mutable)
    new = others(lent.twin)
    lent.twin.load_state_dict(new)
    lent.module.load_state_dict(new, assign=True)
    for name, _ in lent.module.named_parameters():
        new[name].zero_()
    assert same(lent.module.state_dict(), lent.twin.state_dict())


@kinds
@forms
def test_strict_and_not(client: Client, mutable: bool, assign: bool) -> None:
    lent = Lent(client, Block, mutable=mutable)
    new = others(lent.twin)
    del new["last.weight"]
    new["unknown"] = torch.ones(1)
    said = []
    for module in (lent.module, lent.twin):
        with pytest.raises(RuntimeError) as refused:
            module.load_state_dict(new, assign=assign)
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert same(lent.module.state_dict(), lent.twin.state_dict())
    found = lent.module.load_state_dict(new, strict=False, assign=assign)
    assert found == lent.twin.load_state_dict(new, strict=False, assign=assign)
    assert found.missing_keys == ["last.weight"]
    assert same(lent.module.state_dict(), lent.twin.state_dict())


@forms
def test_another_shape_is_refused_as_torch_does(client: Client, assign: bool) -> None:
    lent = Lent(client, Block)
    new: dict[str, Any] = others(lent.twin)
    new["first.weight"] = torch.ones(3, 3)
    new["last.weight"] = "no tensor"
    said = []
    for module in (lent.module, lent.twin):
        with pytest.raises(RuntimeError) as refused:
            module.load_state_dict(new, assign=assign)
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert "size mismatch for first.weight" in said[0]
    assert same(lent.module.state_dict(), lent.twin.state_dict())


def test_another_type_is_cast(client: Client) -> None:
    lent = Lent(client, Block)
    new = {name: value.double() for name, value in others(lent.twin).items()}
    lent.twin.load_state_dict(new)
    for assign in (False, True):
        lent.module.load_state_dict(new, assign=assign)
        weight = lent.module.get_parameter("first.weight")
        assert weight.dtype is torch.float32
        assert torch.equal(lent.module.state_dict()["first.weight"], new["first.weight"].float())


@kinds
def test_what_is_tied_is_loaded_as_one(client: Client, mutable: bool) -> None:
    lent = Lent(client, Tied, mutable=mutable)
    new = others(lent.twin)
    for module in (lent.module, lent.twin):
        module.load_state_dict(new)
    assert same(lent.module.state_dict(), lent.twin.state_dict())


@kinds
def test_a_submodule_alone(client: Client, mutable: bool) -> None:
    lent = Lent(client, lambda: nn.Sequential(Block(), nn.Sequential(Block())), mutable=mutable)
    given = record_updates(lent)
    for name in ("0", "1", "1.0.last"):
        new = others(lent.twin.get_submodule(name))
        lent.module.get_submodule(name).load_state_dict(new)
        lent.twin.get_submodule(name).load_state_dict(new)
        assert same(lent.module.state_dict(), lent.twin.state_dict())
    assert len(given) == 3


def test_in_something_that_was_never_registered(client: Client) -> None:
    lent = Lent(client, Block)
    whole = nn.ModuleDict({"mine": lent.module, "other": nn.Linear(2, 2)})
    twin = nn.ModuleDict({"mine": lent.twin, "other": nn.Linear(2, 2)})
    new = others(twin)
    given = record_updates(lent)
    whole.load_state_dict(new)
    assert len(given) == 1
    assert same(dict(whole.state_dict()), new)


def test_in_a_lease_it_is_not_torn(client: Client) -> None:
    """Mutable weights may be written in a lease; the caller's own lease is no obstacle."""
    lent = Lent(client, Block, mutable=True)
    new = others(lent.twin)
    with client.acquire("m"):
        lent.module.load_state_dict(new)
    assert same(dict(lent.module.state_dict()), new)


class Odd(nn.Linear):
    """Has its own loading: doubles values, and fails on demand."""

    broken = False

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *more: Any) -> None:
        if self.broken:
            raise KeyError("broken")
        state = {**state, prefix + "weight": state[prefix + "weight"] * 2}
        self.seen = True
        super()._load_from_state_dict(state, prefix, *more)


class Part(nn.Linear):
    """Writes to a part of its weight, outside of torch's loading."""

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.weight[0].copy_(state[prefix + "weight"][0])


class Replaces(nn.Linear):
    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        self.weight = nn.Parameter(torch.ones(7, 7))


@kinds
def test_a_class_s_own_loading_is_asked_for(client: Client, mutable: bool) -> None:
    lent = Lent(client, lambda: nn.Sequential(Odd(3, 3), Part(2, 2)), mutable=mutable)
    new = others(lent.twin)
    modules: list[Any] = [lent.module, lent.twin]
    for module in modules:
        module.load_state_dict(new)
        assert module[0].seen
    assert same(lent.module.state_dict(), lent.twin.state_dict())


@kinds
def test_what_raises_on_the_way_has_loaded_nothing(client: Client, mutable: bool) -> None:
    lent = Lent(client, lambda: nn.Sequential(nn.Linear(3, 3), Odd(3, 3)), mutable=mutable)
    odd: Any = lent.module.get_submodule("1")
    new = others(lent.twin)
    odd.broken = True
    with pytest.raises(KeyError, match="broken"):
        lent.module.load_state_dict(new)
    assert not state_dict._loads()
    assert same(lent.module.state_dict(), lent.twin.state_dict())
    odd.broken = False
    lent.module.load_state_dict(new)
    lent.twin.load_state_dict(new)
    assert same(lent.module.state_dict(), lent.twin.state_dict())


def test_a_replacement_that_does_not_fit_is_refused(client: Client) -> None:
    lent = Lent(client, lambda: nn.Sequential(nn.Linear(2, 2), Replaces(2, 2)))
    weight = lent.module.get_parameter("1.weight")
    with pytest.raises(NotWhileAttached, match=r"'1\.weight'"):
        lent.module.load_state_dict(others(lent.twin))
    assert lent.module.get_parameter("1.weight") is weight
    assert same(lent.module.state_dict(), lent.twin.state_dict())


def test_an_exception_elsewhere_leaves_the_next_load_alone(client: Client) -> None:
    lent = Lent(client, lambda: nn.Linear(2, 2))
    broken = Odd(2, 2)
    broken.broken = True
    whole = nn.Sequential(lent.module, broken)
    # the component is loaded by then; only later modules are not
    with pytest.raises(KeyError):
        whole.load_state_dict(others(nn.Sequential(lent.twin, nn.Linear(2, 2))))
    new = others(lent.twin)
    lent.module.load_state_dict(new)
    assert same(dict(lent.module.state_dict()), new)
    assert not state_dict._loads()


def test_a_component_in_blocks_is_given_its_values_by_one_update(client: Client) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    twin = copy.deepcopy(model)
    blocks: dict[str, Any] = {f"blocks.{i}": block for i, block in enumerate(model)}
    parts = client.register_family("dit", blocks)
    weights = ComponentWeights(client, "dit", [client.session.own(part.name) for part in parts])
    guard(model, weights, lambda undo: None)
    evict(client, *(part.name for part in parts))
    assert same(model.state_dict(), twin.state_dict())
    given: list[Any] = []
    update = client._update_together

    def recorded(values: Any) -> None:
        given.extend((name, len(named)) for name, named in values.items())
        update(values)

    client._update_together = recorded  # type: ignore[method-assign]
    new = others(twin)
    model.load_state_dict(new)
    assert given == [("dit", 3 * 5)]
    assert same(dict(model.state_dict()), new)
    with client.acquire("dit"):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, new[name])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@kinds
def test_in_any_mode(client: Client, mode: Any, mutable: bool) -> None:
    lent = Lent(client, Block, mutable=mutable)
    new = others(lent.twin)
    with mode():
        lent.module.load_state_dict(new)
    assert same(dict(lent.module.state_dict()), new)
    assert not any(p.is_inference() for p in lent.module.parameters())


def test_with_parameters_swapped_as_torch_s_own_flag_has_it(client: Client) -> None:
    lent = Lent(client, lambda: nn.Linear(3, 3))
    weight = lent.module.get_parameter("weight")
    new = others(lent.twin)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        lent.module.load_state_dict(new)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert lent.module.get_parameter("weight") is weight
    assert same(dict(lent.module.state_dict()), new)
