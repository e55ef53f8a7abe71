"""Copies of modules while their weights are absent: plain modules with weights of their own."""

import copy
import gc
import io
import multiprocessing
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from swapd_client import Client
from swapd_client.offload.copies import Marker
from tests.offload.modules import TOKENS, Encoder, assert_comes_back, computed
from tests.offload.test_state_dict import Block, Tied
from tests.offload.twins import Lent, same


def is_plain(module: nn.Module) -> bool:
    """Whether a module and its children have no attribute of swapd."""
    return not any(
        isinstance(value, Marker) or isinstance(getattr(value, "__self__", None), Marker)
        for one in module.modules()
        for value in (*vars(one).values(), *all_hooks(one))
    )


def all_hooks(module: nn.Module) -> list[Any]:
    tables = [v for k, v in vars(module).items() if "_hooks" in k and isinstance(v, dict)]
    return [hook for table in tables for hook in table.values()]


def by_deepcopy(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def by_pickle(module: nn.Module) -> nn.Module:
    made: nn.Module = pickle.loads(pickle.dumps(module))
    return made


def by_torch(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    made: nn.Module = torch.load(file, weights_only=False)
    return made


WAYS = [by_deepcopy, by_pickle, by_torch]
every_way = pytest.mark.parametrize("way", WAYS)


@every_way
@pytest.mark.parametrize("mutable", [False, True])
def test_a_copy_is_a_plain_module_that_computes_the_same(
    client: Client, way: Any, mutable: bool
) -> None:
    lent = Lent(client, lambda: nn.Sequential(Block(), Block()).eval(), mutable=mutable)
    made = way(lent.module)
    assert is_plain(made)
    assert same(dict(made.state_dict()), dict(lent.twin.state_dict()))
    x = torch.randn(3, 16)
    assert torch.equal(made(x), lent.twin(x))
    assert [list(vars(m)) for m in made.modules()] == [list(vars(m)) for m in lent.twin.modules()]
    assert made.get_buffer("0.table").tolist() == [0, 1, 2, 3]


@every_way
def test_what_is_tied_is_tied_in_the_copy(client: Client, way: Any) -> None:
    lent = Lent(client, Tied)
    made, expected = way(lent.module), way(lent.twin)
    assert made.head.weight is made.embed.weight
    assert is_plain(made)
    shared = [
        len({p.untyped_storage().data_ptr() for p in (one.q, one.k, one.inner.v)})
        for one in (made, expected)
    ]
    assert shared[0] == shared[1] == (1 if way is by_torch else 3), "as torch has it"
    assert same(made.state_dict(), expected.state_dict())


@every_way
def test_a_copy_of_what_holds_it(client: Client, way: Any) -> None:
    """Through modules that were never registered, or through a list."""
    lent = Lent(client, Block)
    whole = nn.ModuleDict({"mine": lent.module, "other": nn.Linear(2, 2)})
    made = way(whole)
    assert is_plain(made)
    assert same(made["mine"].state_dict(), lent.twin.state_dict())
    (in_a_list,) = way([lent.module])
    assert same(in_a_list.state_dict(), lent.twin.state_dict())


def note(module: Any, *_: Any) -> None:
    module.calls = getattr(module, "calls", 0) + 1


@every_way
def test_hooks_of_others_are_copied_and_what_is_set_on_parameters_as_ever(
    client: Client, way: Any
) -> None:
    def make() -> nn.Module:
        module = nn.Linear(3, 3)
        module.register_forward_hook(note, always_call=True)
        vars(module.weight)["note"] = "mine"
        module.weight.requires_grad_(False)
        return module

    lent = Lent(client, make)
    made, expected = way(lent.module), way(lent.twin)
    made(torch.ones(3))
    assert made.calls == 1
    assert len(made._forward_hooks_always_called) == 1
    assert vars(made.weight) == vars(expected.weight)
    assert not made.weight.requires_grad
    assert made.bias.requires_grad


class Lists(nn.Module):
    """Parameters and tensors outside of the usual places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.flat = [self.inner.weight]
        self.named = {"bias": self.inner.bias}


@every_way
def test_parameters_in_lists_stay_the_parameters(client: Client, way: Any) -> None:
    made = way(Lent(client, Lists).module)
    assert made.flat[0] is made.inner.weight
    assert made.named["bias"] is made.inner.bias


@every_way
def test_a_recurrent_module_that_keeps_lists_of_its_weights(client: Client, way: Any) -> None:
    lent = Lent(client, lambda: nn.LSTM(4, 8, num_layers=2, bidirectional=True))
    lent.module.to("cpu")
    made = way(lent.module)
    assert is_plain(made)
    x = torch.randn(3, 2, 4)
    assert torch.equal(made(x)[0], lent.twin(x)[0])
    assert torch.equal(lent.run(x)[0], lent.twin(x)[0])
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert not made(x)[0].any()


class Slow(nn.Module):
    """A class with its own pickling."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.cache = "to be dropped"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cache": None}


@every_way
def test_a_class_s_own_state_is_asked_for(client: Client, way: Any) -> None:
    made = way(Lent(client, Slow).module)
    assert made.cache is None
    assert is_plain(made)


class Careful(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made: Any = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(vars(self), memo)
        made.copied = True
        return made


def test_a_class_s_own_deepcopy_is_asked_for(client: Client) -> None:
    lent = Lent(client, lambda: nn.Sequential(Careful(2, 2)))
    made = copy.deepcopy(lent.module)
    assert made[0].copied  # type: ignore[index]
    assert is_plain(made)
    assert same(made.state_dict(), lent.twin.state_dict())
    made.half()


def test_a_parametrized_module_is_copied(client: Client) -> None:
    lent = Lent(client, lambda: parametrizations.weight_norm(nn.Conv1d(2, 3, 3)))
    made = copy.deepcopy(lent.module)
    assert is_plain(made)
    x = torch.randn(1, 2, 8)
    assert torch.equal(made(x), lent.twin(x))


def answer(module: nn.Module, x: torch.Tensor, queue: Any) -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        queue.put(module(x).tolist())


@pytest.mark.parametrize(
    "wrapped",
    [lambda m: torch.compile(m, backend="eager"), torch.fx.symbolic_trace],
    ids=["compiled", "traced"],
)
def test_a_compiled_or_traced_module_is_copied(client: Client, wrapped: Any) -> None:
    lent = Lent(client, lambda: wrapped(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    made = copy.deepcopy(lent.module)
    assert is_plain(made)
    assert type(made).__name__ == type(copy.deepcopy(lent.twin)).__name__
    x = torch.randn(2, 4)
    assert torch.equal(made(x), lent.twin(x))


@every_way
def test_a_module_that_keeps_its_attachment_is_refused_and_goes_on(
    client: Client, way: Any
) -> None:
    model, expected = computed(TOKENS, Encoder)
    with client.attach({"m": model}) as attachment, torch.inference_mode():
        model.attachment = attachment
        with pytest.raises(TypeError, match=r"Leave it out of what you copy"):
            way(model)
        gc.collect()
        assert_comes_back(client, model, TOKENS, expected, "m")


def test_methods_that_a_module_has_of_its_own_are_asked_and_put_back(client: Client) -> None:
    """Other code may have replaced them on this one module."""
    asked = []

    def make() -> Any:
        module: Any = nn.Linear(4, 4)
        theirs = module._load_from_state_dict

        def load(*args: Any) -> None:
            asked.append("load")
            theirs(*args)

        module._load_from_state_dict = load
        return module

    lent = Lent(client, make)
    lent.module.load_state_dict(lent.module.state_dict())
    assert asked == ["load"]
    lent.end()
    assert [*vars(lent.module)] == [*vars(lent.twin)]
    lent.module.load_state_dict(lent.twin.state_dict())
    assert asked == ["load", "load"]


def test_it_can_be_given_to_a_process_that_is_spawned(client: Client) -> None:
    lent = Lent(client, lambda: Block().eval())
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    x = torch.randn(2, 16)
    process = context.Process(target=answer, args=(lent.module, x, queue))
    process.start()
    found = queue.get(timeout=60)
    process.join()
    assert found == lent.twin(x).tolist()
    assert torch.equal(lent.run(x), lent.twin(x))
