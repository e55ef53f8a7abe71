"""Layers that do not fit come and go inside each step, on a real strict daemon. Without vLLM."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import swapd_client
from swapd_client import InvalidArgument, TooLarge
from swapd_client.vllm.options import options_of
from swapd_client.vllm.stage import Stage
from tests.guarantees.harness import MIB, World
from tests.plugin import test_rejoining
from tests.plugin.test_rejoining import Lives
from tests.plugin.test_stage import PATIENCE_S, Scene, await_leases, draw, leases

lives = test_rejoining.lives

CHUNK = 2 * MIB
X = torch.ones(1, 512)


class Deep(nn.Module):
    """Six layers of 2 MiB (one chunk), and a head of 1/2 MiB (another)."""

    def __init__(self, seed: int = 0, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 1024, bias=False) for _ in range(layers))
        self.head = nn.Linear(512, 256, bias=False)
        draw(self, seed, 1 / 16)

    def forward(self, x: torch.Tensor, order: Callable[[Any], Any] = iter) -> torch.Tensor:
        for layer in order(self.layers):
            x = layer(x)[..., :512]
        out: torch.Tensor = self.head(x)
        return out


def streamed(scene: Scene, name: str, seed: int = 0, **given: Any) -> tuple[Stage, Deep]:
    """By default every second layer streams."""
    given = given or {"offload_group_size": 2}
    stage, model = scene.connect(name, load_workspace=0, finish_within_s=0, **given), Deep(seed)
    stage.memory.take({"": model})
    return stage, model


def step(stage: Stage, model: Deep, **how: Any) -> torch.Tensor:
    stage.begin()
    try:
        with torch.inference_mode():
            out: torch.Tensor = model(X, **how)
            return out
    finally:
        stage.end()


def passing(scene: Scene) -> list[str]:
    status = scene.daemon.status()
    return [c.name for c in status.components if c.part_of.endswith(".streamed")]


@pytest.mark.parametrize(
    ("given", "passes", "chunks"),
    [
        pytest.param({"offload_group_size": 2}, 3, 1 + 3 + 2, id="every second"),
        pytest.param({"offload_group_size": 3, "offload_num_in_group": 2}, 4, 1 + 2 + 3, id="2/3"),
        pytest.param({"enable_layerwise_offload": True}, 6, 1 + 3, id="all"),
        pytest.param({"cpu_offload_gb": 6 / 1024}, 3, 1 + 3 + 2, id="cpu_offload_gb"),
        pytest.param({"resident": "7MiB"}, 3, 1 + 3 + 2, id="resident"),
        pytest.param({"resident": "20MiB"}, 0, 7, id="all of it is to stay"),
        pytest.param({"resident": "auto"}, 0, 7, id="all of it fits"),
    ],
)
def test_what_is_in_is_what_stays_and_the_window(
    scene: Scene, given: dict[str, Any], passes: int, chunks: int
) -> None:
    stage, model = streamed(scene, "thinker", **given)
    assert len(passing(scene)) == passes
    for _ in range(5):
        assert torch.equal(step(stage, model), Deep()(X))
    status = scene.daemon.status()
    assert status.peak_bytes == chunks * CHUNK
    assert bool(status.evictions) == bool(passes)


@pytest.mark.parametrize("order", ["reversed", "twice", "only some"])
def test_layers_may_run_in_any_order(scene: Scene, order: str) -> None:
    stage, model = streamed(scene, "thinker", enable_layerwise_offload=True)
    orders: dict[str, Callable[[Any], Any]] = {
        "reversed": reversed,
        "twice": lambda layers: [one for layer in layers for one in (layer, layer)],
        "only some": lambda layers: [layers[1], layers[4], layers[3], layers[4]],
    }
    how = {"order": orders[order]}
    for _ in range(4):
        assert torch.equal(step(stage, model, **how), Deep()(X, **how))
        assert torch.equal(step(stage, model), Deep()(X))


AUTO: dict[str, Any] = {"resident": "auto"}
HALF: dict[str, Any] = {"offload_group_size": 2}


@pytest.mark.parametrize(
    ("given", "least", "chunks"),
    [
        *(pytest.param(AUTO, 3, n, id=f"as many as do not fit in {n}") for n in (2, 3, 6)),
        *(pytest.param(HALF, 6, n, id=f"half of them in {n}") for n in (5, 6, 11)),
    ],
)
def test_two_of_them_run_or_are_refused_and_never_hang(
    world: World, given: dict[str, Any], least: int, chunks: int
) -> None:
    """Whole they have 7 chunks each; with half of the layers streamed, a turn has 6."""
    scene = Scene(world.daemon("d", budget=f"{chunks * 2}MiB"))
    try:
        if chunks < least:
            with pytest.raises(TooLarge, match="at least"):
                streamed(scene, "a", **given)
            return
        both = [streamed(scene, name, seed, **given) for seed, name in enumerate("ab")]
        expected = [Deep(seed)(X) for seed in range(2)]
        wrong: list[int] = []

        def run(number: int) -> None:
            said = [step(*both[number]) for _ in range(12)]
            wrong.extend(number for one in said if not torch.equal(one, expected[number]))

        done = [scene.meanwhile(partial(run, number)) for number in range(2)]
        assert all(one.wait(PATIENCE_S) for one in done)
        assert not wrong
        assert scene.daemon.status().peak_bytes <= chunks * CHUNK
    finally:
        scene.close()


def test_a_rival_that_needs_the_windows_room_is_heard_between_steps(scene: Scene) -> None:
    stage, model = streamed(scene, "thinker")
    stage.note(["a"], ())
    step(stage, model)
    with swapd_client.connect(scene.daemon.folder) as rival:
        came = scene.meanwhile(lambda: rival.acquire_workspace(5 * CHUNK).release())
        while not came.is_set():
            assert torch.equal(step(stage, model), Deep()(X))
    assert torch.equal(step(stage, model), Deep()(X))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_that_ends_in_a_step_costs_nothing_and_the_next_streams_again(
    lives: Lives, how: signal.Signals
) -> None:
    stage, model = streamed(lives, "thinker")
    expected = Deep()(X)

    def killed(layers: Any) -> Any:
        for number, layer in enumerate(layers):
            if number == 3:
                os.kill(lives.daemon.pid, how)
            yield layer

    assert torch.equal(step(stage, model), expected)
    assert torch.equal(step(stage, model, order=killed), expected)
    assert torch.equal(step(stage, model), expected)
    lives.bring_back(stage)
    for _ in range(3):
        assert torch.equal(step(stage, model), expected)
    status = lives.daemon.status()
    assert len(passing(lives)) == 3
    assert status.peak_bytes == 6 * CHUNK


def test_what_fails_in_a_layer_leaves_the_window_usable(scene: Scene) -> None:
    stage, model = streamed(scene, "thinker")

    def fails(layers: Any) -> Any:
        yield from layers[:2]
        raise ArithmeticError

    for _ in range(3):
        with pytest.raises(ArithmeticError):
            step(stage, model, order=fails)
        assert torch.equal(step(stage, model), Deep()(X))


def test_a_closed_stage_holds_nothing(scene: Scene) -> None:
    stage, model = streamed(scene, "thinker")
    stage.note(["a"], ())
    step(stage, model)
    assert len(leases(scene.daemon)) == 4 + 2
    stage.close()
    scene.await_gone(stage)
    await_leases(scene.daemon, {})
    assert not [one for one in threading.enumerate() if one.name == "swapd-window"]
    assert torch.equal(Deep()(X), model(X)), "in private memory now"


@pytest.mark.parametrize("layers", [3, 6])
def test_another_model_takes_the_place_of_one_that_was_taken_back(
    scene: Scene, layers: int
) -> None:
    stage, model = streamed(scene, "thinker", resident="7MiB")
    assert torch.equal(step(stage, model), Deep()(X))
    (exchanging,) = (one for one in threading.enumerate() if one.name == "swapd-window")
    stage.memory.take_back()
    exchanging.join(PATIENCE_S)
    assert not exchanging.is_alive(), "two such threads would not wait for each other"
    assert torch.equal(Deep()(X), model(X)), "in private memory now"
    other = Deep(1, layers)
    stage.memory.take({"": other})
    for _ in range(3):
        assert torch.equal(step(stage, other), Deep(1, layers)(X))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cpu_offload_gb": 1}, "cpu_offload_gb: 1 is more than the 12 MiB of its 6 layers"),
        ({"resident": "100KiB"}, "resident: 100 KiB is less than 512 KiB, which its embeddings"),
        ({"resident": "auto", "cpu_offload_gb": 1}, "resident and cpu_offload_gb each say"),
        ({"offload_group_size": 2, "offload_num_in_group": 3}, "3 of a group of 2 layers"),
        ({"resident": "some"}, "swapd.resident: 'some' is not a size"),
        ({"enable_cpu_offload": True}, "enable_cpu_offload is for diffusion stages"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_change(
    scene: Scene, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        streamed(scene, "thinker", **given)
    assert said in str(refused.value)
    assert not passing(scene)


def test_a_model_without_a_list_of_layers_is_refused(scene: Scene) -> None:
    stage = scene.connect("thinker", resident="auto")
    with pytest.raises(InvalidArgument, match="its model has no list of so many: leave out resid"):
        stage.memory.take({"": nn.Linear(512, 1024)})
    assert options_of({"swapd": {}}, "thinker").streams == []
