"""New weights for a model that other threads call meanwhile: each call has the old or the new."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client import Client
from swapd_client.offload.update_barrier import _changing
from tests.offload.modules import evict

#: A block of 4 MiB.
WIDE = 1024
OLD, NEW = 1.0, 2.0


class Block(nn.Module):
    shift: torch.Tensor | None

    def __init__(self, width: int, buffered: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.register_buffer("shift", torch.zeros(width) if buffered else None)
        self.during: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        self.during()
        return out if self.shift is None else out + self.shift

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.loaded()

    def loaded(self) -> None:
        pass


class Net(nn.Module):
    """Returns a number for each block: that of the weights it ran with."""

    def __init__(self, width: int = 64, blocks: int = 4, *, buffered: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, buffered) for _ in range(blocks))
        self.width = width

    def forward(self) -> torch.Tensor:
        x = torch.ones(1, self.width)
        return torch.stack([block(x).mean() for block in self.blocks])

    def steps(self) -> Iterator[torch.Tensor]:
        while True:
            yield self()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = Net()
        self.vae = Net()

    def forward(self) -> torch.Tensor:
        return torch.cat([self.transformer(), self.vae()])


def filled(model: nn.Module, value: float) -> dict[str, torch.Tensor]:
    """A state dict for which every output is `value`; with buffers, ten times as much is added."""
    return {
        name: torch.full_like(t, 10 * value if name.endswith("shift") else value / t.shape[-1])
        for name, t in model.state_dict().items()
    }


def outputs_of(model: nn.Module, state: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
    model.load_state_dict(state)
    return tuple(model().tolist())


class Loading:
    """A model, two state dicts, and the model's output with each."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model.requires_grad_(False)
        self.states = [filled(model, OLD), filled(model, NEW)]
        self.expected = [outputs_of(model, state) for state in self.states]
        model.load_state_dict(self.states[0])


@contextmanager
def attached(client: Client, kind: str) -> Iterator[tuple[Loading, Any]]:
    if kind == "components":
        loading = Loading(Two())
        with client.attach(loading.model) as attachment:
            yield loading, lambda: attachment.use("transformer", "vae")
    elif kind == "streamed":
        loading = Loading(Net(WIDE, 6))
        with client.attach({"dit": loading.model}, resident=0, blocks=["blocks"]):
            yield loading, nullcontext
    else:
        loading = Loading(Net(buffered=kind == "buffers"))
        if kind == "mutable":
            client.register("dit", loading.model, mutable=True)
        with client.attach({"dit": loading.model}):
            yield loading, nullcontext
        if kind == "mutable":
            client.unregister("dit")


KINDS = ["whole", "buffers", "mutable", "components", "streamed"]


def seen_during(
    outputs: Callable[[], Iterator[torch.Tensor]], changes: Iterable[Callable[[], object]]
) -> set[tuple[float, ...]]:
    """The outputs that two threads see while the changes are made, one after the other."""
    ends = threading.Event()

    def run() -> set[tuple[float, ...]]:
        seen = set()
        with torch.inference_mode():
            for output in outputs():
                seen.add(tuple(output.tolist()))
                if ends.is_set():
                    break
        return seen

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(run) for _ in range(2)]
        try:
            for change in changes:
                change()
        finally:
            ends.set()
        return set().union(*(one.result() for one in calls))


def again_and_again(model: Any, held: Any = nullcontext) -> Iterator[torch.Tensor]:
    while True:
        with held():
            output = model()
        yield output


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_has_the_old_weights_or_the_new_ones(client: Client, kind: str) -> None:
    with attached(client, kind) as (loading, held):
        rounds = range(1, 13 if kind == "streamed" else 41)
        loads = (partial(loading.model.load_state_dict, loading.states[n % 2]) for n in rounds)
        seen = seen_during(lambda: again_and_again(loading.model, held), loads)
        assert seen <= set(loading.expected), "some had a part of each"


def test_so_does_update_of_what_is_streamed_and_each_step_of_a_generator(client: Client) -> None:
    with attached(client, "streamed") as (loading, _):
        states = [loading.states[n % 2] for n in range(1, 11)]
        updates = (partial(client.update, "dit", state) for state in states)
        seen = seen_during(lambda: again_and_again(loading.model), updates)
        loads = (partial(loading.model.load_state_dict, state) for state in states)
        seen |= seen_during(loading.model.steps, loads)
        assert seen <= set(loading.expected)


def called_elsewhere(model: nn.Module) -> tuple[float, ...]:
    """The result of a call in another thread."""
    with ThreadPoolExecutor(1) as pool, torch.inference_mode():
        return tuple(pool.submit(model).result().tolist())


def test_what_is_loaded_is_seen_when_all_of_it_is(client: Client) -> None:
    with attached(client, "buffers") as (loading, _):
        seen = []
        last: Any = loading.model.get_submodule("blocks.2")
        last.loaded = lambda: seen.append(called_elsewhere(loading.model))
        loading.model.load_state_dict(loading.states[1])
        assert seen == [loading.expected[0]]
        assert called_elsewhere(loading.model) == loading.expected[1]


def test_if_loading_raises_buffers_stay_as_they_were_too(client: Client) -> None:
    with attached(client, "buffers") as (loading, _):

        def breaks() -> None:
            raise KeyError("broken")

        last: Any = loading.model.get_submodule("blocks.3")
        last.loaded = breaks
        with pytest.raises(KeyError, match="broken"):
            loading.model.load_state_dict(loading.states[1])
        assert called_elsewhere(loading.model) == loading.expected[0]


def test_buffers_stay_the_objects_they_were_unless_assigned(client: Client) -> None:
    with attached(client, "buffers") as (loading, _):
        buffer = loading.model.get_buffer("blocks.0.shift")
        loading.model.load_state_dict(loading.states[1])
        assert loading.model.get_buffer("blocks.0.shift") is buffer
        loading.model.load_state_dict(loading.states[0], assign=True)
        assert loading.model.get_buffer("blocks.0.shift") is loading.states[0]["blocks.0.shift"]
        assert called_elsewhere(loading.model) == loading.expected[0]


@pytest.mark.parametrize("kind", ["buffers", "streamed"])
def test_it_waits_for_calls_that_are_under_way_and_new_ones_wait_for_it(
    client: Client, kind: str
) -> None:
    with attached(client, kind) as (loading, _), ThreadPoolExecutor(3) as pool:
        began, goes_on = threading.Event(), threading.Event()

        def during() -> None:
            began.set()
            goes_on.wait()

        def call() -> tuple[float, ...]:
            with torch.inference_mode():
                return tuple(loading.model().tolist())

        block: Any = loading.model.get_submodule("blocks.1")
        block.during = during
        first = pool.submit(call)
        began.wait()
        del block.during
        block.during = lambda: None
        load = pool.submit(loading.model.load_state_dict, loading.states[1])
        while _changing.now is None:
            assert not load.done()
        second = pool.submit(call)
        assert not load.done()
        goes_on.set()
        assert first.result() == loading.expected[0]
        assert second.result() == loading.expected[1]
        load.result()


def test_an_edit_within_an_edit_waits_for_calls_of_what_it_edits(client: Client) -> None:
    model = nn.ModuleDict({"first": Net(WIDE), "second": Net(WIDE)}).requires_grad_(False)
    second: Any = model["second"]
    began, goes_on, inside = threading.Event(), threading.Event(), threading.Event()

    def during() -> None:
        began.set()
        goes_on.wait()

    def call() -> list[float]:
        with torch.inference_mode():
            return second().tolist()  # type: ignore[no-any-return]

    with (
        client.attach(dict(model.items()), resident=0, blocks=["blocks"]) as attachment,
        ThreadPoolExecutor(2) as pool,
    ):

        def edit() -> None:
            with attachment.edit("first"), attachment.edit("second"), torch.no_grad():
                inside.set()
                for weight in second.parameters():
                    weight.mul_(-1.0)

        second.blocks[1].during = during
        under_way = pool.submit(call)
        began.wait()
        second.blocks[1].during = lambda: None
        edited = pool.submit(edit)
        while not (_changing.now and any("second" in n for n in _changing.now[client])):
            assert not edited.done()
        assert not inside.is_set()
        goes_on.set()
        before = under_way.result()
        edited.result()
        assert call() == [-number for number in before]


def test_who_holds_it_may_wait_for_another_thread_to_load_it(client: Client) -> None:
    """Loading waits for calls, not for `use`; a call itself may load."""
    with attached(client, "buffers") as (loading, _), ThreadPoolExecutor(1) as pool:
        (attachment,) = client.attachments
        with attachment.use("dit"):
            pool.submit(loading.model.load_state_dict, loading.states[1]).result()
        block: Any = loading.model.get_submodule("blocks.3")
        block.during = lambda: loading.model.load_state_dict(loading.states[0])
        with torch.inference_mode():
            loading.model()
        block.during = lambda: None
        assert called_elsewhere(loading.model) == loading.expected[0]


def test_hooks_of_the_module_s_own_loading_see_what_is_loaded(client: Client) -> None:
    """Earlier it belongs to no component, however they know the module."""

    class Renaming(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            this: Any = self
            this._register_load_state_dict_pre_hook(self.before)
            this.register_load_state_dict_pre_hook(with_module)

        def before(self, state: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
            with torch.no_grad():
                self.weight.fill_(7)
            self.version = 2
            state[prefix + "bias"] = state.pop(prefix + "b")

    def with_module(module: nn.Module, state: Any, *_: Any) -> None:
        with torch.no_grad():
            module.get_parameter("weight").add_(1)

    module = Renaming().requires_grad_(False)
    with client.attach({"dit": module}):
        module.load_state_dict({"b": torch.ones(4)}, strict=False)
        state = module.state_dict()
        assert torch.equal(state["weight"], torch.full((4, 4), 8.0))
        assert torch.equal(state["bias"], torch.ones(4))
        assert module.version == 2


def test_somebody_s_function_that_loads_it_leaves_it_its_own_weights(client: Client) -> None:
    """Also if that function raises: then they keep their values."""
    module = nn.Linear(4, 4, bias=False).requires_grad_(False)

    def load(state: Mapping[str, torch.Tensor], prefix: str, *_: Any) -> None:
        module.weight.copy_(state[prefix + "weight"])
        if module.weight.sum() < 0:
            raise ValueError("negative")

    vars(module)["_load_from_state_dict"] = load
    with client.attach({"dit": module}):
        weight, address = module.weight, module.weight.data_ptr()
        module.load_state_dict({"weight": torch.full((4, 4), 2.0)})
        with pytest.raises(ValueError, match="negative"):
            module.load_state_dict({"weight": torch.full((4, 4), -1.0)})
        evict(client, "dit")
        is_same = module.weight is weight  # pytest would read what it compares, and has left
        assert is_same
        assert weight.data_ptr() == address
        assert torch.equal(module(torch.ones(1, 4)), torch.full((1, 4), 8.0))
