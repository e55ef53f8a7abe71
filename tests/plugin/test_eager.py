"""A stage's start runs its model several times, and compiled code in it does not notice."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from swapd_client.vllm import layers
from swapd_client.vllm.eager import eager
from swapd_client.vllm.stage.segments import found_in
from swapd_client.vllm.weight_move import WeightMove
from tests.plugin.test_segments import Model, X, layers_of
from tests.plugin.test_stage import Scene

WIDTH = 768  # layers of 2.25 MiB
STEPS = (1, 2, 1)  # rows of each


class Compiler:
    """A backend whose code computes other numbers than the code that it is compiled from."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return lambda *args: [one + 1 for one in graph(*args)]


COMPILER = Compiler()


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Weights(nn.Module):
    """Computes with weights of its own, so that the check repeats its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class AtFirstCall(nn.Module):
    """Compiles its inner module at its first call, for all sizes, and remembers that."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer(WIDTH)
        self.compiled: Callable[..., Any] | None = None
        self.warmed: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.compiled is None:
            self.compiled = compiled(self.inner.forward)
            self.warmed += sorted(set(STEPS) - {*self.warmed})
            for rows in self.warmed:
                self.compiled(torch.zeros(rows, WIDTH))
        out: torch.Tensor = self.compiled(x)
        return out


class InPlace(nn.Module):
    """Its leaf is compiled in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Weights()
        self.inner.compile(backend=COMPILER, dynamic=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


class Listed(nn.Module):
    """Runs layers that are listed, as those of the stage are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(what: Any) -> Any:
    return torch.compile(what, backend=COMPILER, dynamic=False)


KINDS: list[Callable[[], nn.Module]] = [
    AtFirstCall,
    InPlace,
    lambda: compiled(Layer(WIDTH)),
    lambda: compiled(Listed()),
]


class Talker(nn.Module):
    def __init__(self, predictor: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(2))
        self.predictor = predictor
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.predictor(x)
        return out


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Dynamo forgets this code before each test and after it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def steps(model: nn.Module) -> tuple[list[torch.Tensor], int]:
    """The outputs of steps, and the number of graphs that were compiled in them."""
    torch.manual_seed(20)
    COMPILER.graphs = 0
    with torch.inference_mode():
        out = [model(torch.randn(rows, WIDTH)) for rows in STEPS]
    return out, COMPILER.graphs


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_part_of_a_stage_is_compiled_as_without_swapd(
    scene: Scene, kind: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "PART_CHUNKS", 1)
    model = Talker(kind())
    plain, graphs = steps(model)
    assert graphs == len(set(STEPS))
    for module in model.modules():
        if isinstance(module, AtFirstCall):
            module.compiled = None
    torch._dynamo.reset()

    stage, models, moving = (
        scene.connect("talker"),
        {"": model},
        WeightMove("talker", keep_place=True),
    )

    def forward() -> None:
        model(torch.zeros(1, WIDTH))

    COMPILER.graphs = 0
    with torch.inference_mode():
        moving.move(models, partial(stage.memory.take, models), forward)
        with stage.using():
            moving.compare()
        stage.find_segments(models, forward)
    assert stage.turns.segments, "it leaves by layers"
    assert COMPILER.graphs == 0, "nothing was compiled yet"
    with stage.using():
        now, again = steps(model)
    assert again == graphs
    for one, other in zip(plain, now, strict=True):
        assert torch.equal(one, other)


def test_layers_that_compiled_code_runs_do_not_come_later() -> None:
    """They would have to be compiled again for each wait."""

    class Half(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in list(self.layers)[:3]:
                x = layer(x)
            out: torch.Tensor = compiled(self.layers[3])(x)
            return out

    model = Half()
    with eager([model]):
        found = found_in(layers_of(model), lambda: model(X))
    assert list(found) == ["thinker/layers.0-1"]


def test_modules_are_as_before_whatever_their_first_call_has_changed() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.do_not_compile = False  # as vLLM's
            self.ready, self.by_size, self.sizes = False, {1: "one"}, [1]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.do_not_compile
            self.ready, self.late = True, x
            self.by_size[2] = "two"
            self.sizes.append(2)
            self.register_buffer("made", x, persistent=False)
            raise KeyboardInterrupt

    model = Keeps()
    by_size = model.by_size
    with pytest.raises(KeyboardInterrupt), eager([model]):
        model(torch.ones(1))
    assert (model.do_not_compile, model.ready, model.sizes) == (False, False, [1])
    assert model.by_size is by_size
    assert by_size == {1: "one"}
    assert not hasattr(model, "late")
    assert "made" in dict(model.named_buffers()), "what is registered stays"
