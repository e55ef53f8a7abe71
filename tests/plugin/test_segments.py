"""A turn begins before all parts are loaded: which layers may come later, and wait."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client.vllm.layers import by_layers, modules_of
from swapd_client.vllm.stage.segments import Segments, found_in

X = torch.ones(1, 4)
FIRST = ["thinker.kv", "thinker/rest"]
PARTS = ["thinker/layers.0-1", "thinker/layers.2-3"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def layers_of(model: nn.Module) -> Any:
    """Parts of two layers each, as in a stage."""
    parts = by_layers(
        dict(model.named_parameters()), [[f"layers.{n}" for n in range(4)]], 2 * 2 * 256
    )
    assert list(parts) == ["rest", "layers.0-1", "layers.2-3"]
    return {
        f"thinker/{key}": (modules_of({"": model}, key), tensors)
        for key, tensors in parts.items()
        if key != "rest"
    }


def test_layers_that_are_used_in_their_own_forward_may_come_later() -> None:
    model = Model()
    found = found_in(layers_of(model), lambda: model(X))
    assert {name: list(layers) for name, layers in found.items()} == {
        PARTS[0]: list(model.layers)[:2],
        PARTS[1]: list(model.layers)[2:],
    }
    assert not any(layer._forward_pre_hooks for layer in model.layers)


def test_layers_that_read_others_weights_or_do_not_run_may_not_come_later() -> None:
    model = Model()
    first: Any = model.layers[0]
    second: Any = model.layers[1]
    layers = layers_of(model)
    assert found_in(layers, lambda: model(X + second.weight.sum())) == {}
    assert list(found_in(layers, lambda: second(first(X)))) == [PARTS[0]]


def test_parts_over_one_memory_cannot_be_told_apart() -> None:
    model = Model()
    first: Any = model.layers[0]
    layers = layers_of(model)
    layers["thinker/layers.2-3"][1]["alias"] = first.weight.view(-1)
    assert found_in(layers, lambda: model(X)) == {}


class Turn:
    """A turn that has begun with an early lease; it notes the copies that were waited for."""

    def __init__(
        self, model: Model, *, streams: tuple[int, ...] = (), there: tuple[str, ...] = ()
    ) -> None:
        self.there = {*there}
        self.awaited: list[str] = []
        self.by_streams: list[tuple[str, int]] = []
        self.model = model
        session: Any = SimpleNamespace(
            arrivals=SimpleNamespace(is_complete=lambda place: place.name in self.there),
            processor=SimpleNamespace(current_streams=lambda: streams),
        )
        placements = [SimpleNamespace(name=name) for name in (*FIRST, *PARTS)]
        lease: Any = SimpleNamespace(loaded=True, placements=placements, wait=self.wait)
        self.segments = Segments(lambda error: None)
        self.segments.use(found_in(layers_of(model), lambda: model(X)))
        assert self.segments.begin(lease, session) == len({*PARTS} - self.there)

    def wait(self, name: str, stream: int | None = None) -> None:
        if stream is None:
            self.awaited.append(name)
        else:
            self.by_streams.append((name, stream))

    @property
    def waiting(self) -> int:
        """The number of layers that have a `forward` of their own."""
        return sum("forward" in vars(layer) for layer in self.model.layers)


@pytest.fixture
def model() -> Model:
    return Model()


def test_what_is_in_no_layer_is_waited_for_first_and_layers_when_they_compute(
    model: Model,
) -> None:
    turn = Turn(model)
    assert turn.awaited == FIRST
    assert turn.waiting == 4
    model(X)
    assert turn.awaited == [*FIRST, *PARTS]
    assert not turn.waiting, "all of it is known to be there"
    model(X)
    assert turn.awaited == [*FIRST, *PARTS], "each of them once"


def test_a_layer_waits_that_is_called_by_its_forward_alone(model: Model) -> None:
    turn = Turn(model)
    model.layers[2].forward(X)
    assert turn.awaited == [*FIRST, PARTS[1]]
    assert turn.waiting == 2, "no layer of that part waits any more"


def test_a_forward_that_others_put_over_it_meanwhile_stays(model: Model) -> None:
    turn = Turn(model)
    layer: Any = model.layers[0]
    over = layer.forward
    layer.forward = outer = lambda x: over(x) + 1
    wanted = model(X)
    assert turn.awaited == [*FIRST, *PARTS]
    turn.segments.drop()
    assert layer.forward is outer
    assert torch.equal(model(X), wanted)


def test_what_streams_have_waited_for_is_known_to_be_there_before_the_step_ends(
    model: Model,
) -> None:
    """A stream's wait for a copy that failed ends without an error."""
    turn = Turn(model, streams=(7,))
    model(X)
    assert turn.waiting == 4, "another stream has not waited"
    by_stream = [(name, 7) for name in (*FIRST, *PARTS)]
    assert turn.by_streams == by_stream
    assert not turn.awaited
    turn.segments.arrive()
    assert turn.awaited == [*FIRST, *PARTS]
    assert turn.by_streams == by_stream


@pytest.mark.parametrize("streams", [(), (7,)])
def test_once_all_parts_have_come_no_layer_waits_any_more(
    model: Model, streams: tuple[int, ...]
) -> None:
    turn = Turn(model, streams=streams)
    turn.there |= {*FIRST, *PARTS}
    layer: Any = model.layers[0]
    layer(X)
    assert not turn.waiting
    assert {*PARTS} <= {*turn.awaited}, "each is made accessible"
    before = len(turn.awaited)
    model(X)
    turn.segments.arrive()
    assert len(turn.awaited) == before


def test_what_came_after_the_grant_and_before_the_turn_is_made_accessible(model: Model) -> None:
    turn = Turn(model, there=(FIRST[1], PARTS[0]))
    assert turn.awaited == [*FIRST, PARTS[0]]
    assert turn.waiting == 2
