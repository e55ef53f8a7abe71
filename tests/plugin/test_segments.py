"""A turn begins before all parts are loaded: which layers may come later, and wait."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client.errors import DaemonGone, DeviceFailed, SessionFenced, SwapdError
from swapd_client.vllm.layers import by_layers, modules_of
from swapd_client.vllm.stage.segments import Segments, found_in

X = torch.ones(1, 4)


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


class Peeks(Model):
    """Reads the weight of a layer before that layer runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second: Any = self.layers[1]
        return super().forward(x + second.weight.sum())


class Skips(Model):
    """Leaves out the last two layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in list(self.layers)[:2]:
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
        "thinker/layers.0-1": list(model.layers)[:2],
        "thinker/layers.2-3": list(model.layers)[2:],
    }
    assert not any(layer._forward_pre_hooks for layer in model.layers)


def test_a_model_that_uses_weights_before_their_layer_computes_has_none() -> None:
    model = Peeks()
    assert found_in(layers_of(model), lambda: model(X)) == {}


def test_what_did_not_compute_may_not_come_later() -> None:
    model = Skips()
    assert list(found_in(layers_of(model), lambda: model(X))) == ["thinker/layers.0-1"]


def test_parts_over_one_memory_cannot_be_told_apart() -> None:
    model = Model()
    first: Any = model.layers[0]
    layers = layers_of(model)
    layers["thinker/layers.2-3"][1]["alias"] = first.weight.view(-1)
    assert found_in(layers, lambda: model(X)) == {}


def test_a_part_of_one_layer_and_one_of_another_model_are_found() -> None:
    model, drafter = Model(), Model()
    models = {"": model, "drafter": drafter}
    assert modules_of(models, "layers.3") == [model.layers[3]]
    assert modules_of(models, "drafter.layers.1-2") == list(drafter.layers)[1:3]


class Copies:
    """Of a session: complete copies, those that were waited for, and streams."""

    def __init__(self, *there: str) -> None:
        self.there = {*there}
        self.awaited: list[str] = []
        self.error: SwapdError | None = None
        self.by_streams: list[tuple[str, int]] = []
        self.streams: tuple[int, ...] = ()

    def is_complete(self, place: Any) -> bool:
        return place.name in self.there

    def current_streams(self) -> tuple[int, ...]:
        return self.streams


class Turn:
    """A turn that has begun with an early lease."""

    def __init__(
        self, model: Model, *there: str, loaded: bool = True, streams: tuple[int, ...] = ()
    ) -> None:
        self.copies = Copies(*there)
        self.copies.streams = streams
        session: Any = SimpleNamespace(arrivals=self.copies, processor=self.copies)
        self.session = session
        self.model = model
        self.alone: list[SwapdError] = []
        names = ("thinker.kv", "thinker/rest", "thinker/layers.0-1", "thinker/layers.2-3")
        lease: Any = SimpleNamespace(
            loaded=loaded,
            placements=[SimpleNamespace(name=name) for name in names],
            wait=self.wait,
        )
        self.lease = lease
        self.segments = Segments(self.go_alone)
        self.segments.use(found_in(layers_of(model), lambda: model(X)))
        self.coming = self.segments.begin(self.lease, self.session)

    def wait(self, name: str, stream: int | None = None) -> None:
        if stream is None:
            self.copies.awaited.append(name)
        else:
            self.copies.by_streams.append((name, stream))
        if self.copies.error is not None:
            raise self.copies.error

    def go_alone(self, error: SwapdError) -> None:
        self.alone.append(error)
        self.segments.drop()

    @property
    def waiting(self) -> int:
        """The number of layers that have a `forward` of their own."""
        return sum("forward" in vars(layer) for layer in self.model.layers)


@pytest.fixture
def model() -> Model:
    return Model()


FIRST = ["thinker.kv", "thinker/rest"]
PARTS = ["thinker/layers.0-1", "thinker/layers.2-3"]


def test_what_is_in_no_layer_is_waited_for_first_and_layers_when_they_compute(
    model: Model,
) -> None:
    turn = Turn(model)
    assert turn.coming == 2
    assert turn.copies.awaited == FIRST
    assert turn.waiting == 4
    model(X)
    assert turn.copies.awaited == [*FIRST, *PARTS]
    assert not turn.waiting, "all of it is known to be there"
    model(X)
    assert turn.copies.awaited == [*FIRST, *PARTS], "each of them once"


def test_a_layer_waits_that_is_called_by_its_forward_alone(model: Model) -> None:
    turn = Turn(model)
    model.layers[2].forward(X)
    assert turn.copies.awaited == [*FIRST, PARTS[1]]
    assert turn.waiting == 2, "no layer of that part waits any more"


def test_a_forward_that_a_layer_had_of_its_own_is_there_again(model: Model) -> None:
    layer: Any = model.layers[0]
    plain = layer.forward
    layer.forward = of_its_own = lambda x: plain(x) + 1
    wanted = model(X)
    turn = Turn(model)
    assert torch.equal(model(X), wanted)
    assert layer.forward is of_its_own
    turn.segments.drop()
    assert layer.forward is of_its_own


def test_a_forward_that_others_put_over_it_meanwhile_stays(model: Model) -> None:
    turn = Turn(model)
    layer: Any = model.layers[0]
    over = layer.forward
    layer.forward = outer = lambda x: over(x) + 1
    wanted = model(X)
    assert turn.copies.awaited == [*FIRST, *PARTS]
    turn.segments.drop()
    assert layer.forward is outer
    assert torch.equal(model(X), wanted)


def test_once_all_of_it_is_there_nothing_is_left_of_it(model: Model) -> None:
    turn = Turn(model)
    turn.segments.arrive()
    assert turn.copies.awaited == [*FIRST, *PARTS]
    assert not turn.waiting
    turn.segments.arrive()
    assert turn.copies.awaited == [*FIRST, *PARTS]


def test_what_streams_have_waited_for_is_known_to_be_there_before_the_step_ends(
    model: Model,
) -> None:
    """A stream's wait for a copy that failed ends without an error."""
    turn = Turn(model, streams=(7,))
    model(X)
    assert turn.waiting == 4, "another stream has not waited"
    by_stream = [(name, 7) for name in (*FIRST, *PARTS)]
    assert turn.copies.by_streams == by_stream
    assert not turn.copies.awaited
    turn.segments.arrive()
    assert turn.copies.awaited == [*FIRST, *PARTS]
    assert turn.copies.by_streams == by_stream


def test_in_a_stage_that_is_in_no_layer_waits(model: Model) -> None:
    assert not Turn(model, loaded=False).waiting
    turn = Turn(model, *FIRST, *PARTS)
    assert not turn.coming
    assert not turn.waiting
    assert not turn.copies.awaited


def test_what_is_there_already_is_not_waited_for(model: Model) -> None:
    turn = Turn(model, "thinker/rest", PARTS[0])
    assert turn.coming == 1
    model(X)
    assert turn.copies.awaited == ["thinker.kv", PARTS[1]]


@pytest.mark.parametrize("streams", [(), (7,)])
def test_once_all_parts_have_come_no_layer_waits_any_more(
    model: Model, streams: tuple[int, ...]
) -> None:
    turn = Turn(model, streams=streams)
    turn.copies.there |= {*FIRST, *PARTS}
    layer: Any = model.layers[0]
    layer(X)
    assert not turn.waiting
    waited = [*turn.copies.awaited, *(name for name, _ in turn.copies.by_streams)]
    assert waited == FIRST, "before the layers began"
    turn.segments.arrive()
    assert not {*turn.copies.awaited} & {*PARTS}


def test_a_layer_waits_while_a_part_after_it_is_still_to_come(model: Model) -> None:
    turn = Turn(model)
    turn.copies.there |= {*FIRST, PARTS[0]}
    model(X)
    assert turn.copies.awaited == [*FIRST, *PARTS]


@pytest.mark.parametrize("error", [DeviceFailed("no"), SessionFenced("late")])
def test_what_does_not_come_ends_the_step(model: Model, error: SwapdError) -> None:
    turn = Turn(model)
    turn.copies.error = error
    with pytest.raises(type(error)):
        model(X)
    assert turn.segments.broken
    assert not turn.alone
    with pytest.raises(type(error)):
        turn.segments.arrive()
    turn.segments.drop()
    assert not turn.segments.broken
    assert not turn.waiting


def test_where_the_daemon_is_gone_the_step_goes_on_with_what_the_host_has(model: Model) -> None:
    turn = Turn(model)
    turn.copies.error = DaemonGone("gone")
    model(X)
    assert turn.alone == [turn.copies.error]
    assert not turn.waiting
    turn.segments.arrive()


def test_a_stage_without_segments_begins_when_all_is_there(model: Model) -> None:
    turn = Turn(model)
    assert turn.segments
    turn.segments.use({})
    assert not turn.segments
    assert turn.segments.begin(turn.lease, turn.session) == 0
