"""A worker process of a stage, on a real strict daemon with room for one stage. Without vLLM."""

import logging
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import swapd_client
from swapd.shared.units import size
from swapd_client import DuplicateName, InvalidSource, TooLarge, connect
from swapd_client.lease import Lease
from swapd_client.vllm.options import options_of
from swapd_client.vllm.stage import Stage, turns
from swapd_client.vllm.stage.connection import Stopped
from swapd_client.vllm.stage.kv_cache import KvTerms, Layer
from tests.guarantees.harness import MIB, Daemon
from tests.offload.test_wrappers import Scaled

PATIENCE_S = 60.0
#: Rows of a float32 matrix of 8 MiB: two of them do not fit with anything else.
ROWS = 2048
OUT = ("absent", "filling")


def draw(model: nn.Module, seed: int, most: float) -> None:
    """Draw its parameters from this seed."""
    own = torch.Generator().manual_seed(seed)  # the global one is shared by all threads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-most, most, generator=own)


class Model(nn.Module):
    """8 MiB, and two encoders of 1 MiB."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.language_model = nn.Linear(1024, ROWS, bias=False)
        self.visual = nn.Linear(512, 512, bias=False)
        self.audio_tower = nn.Linear(512, 512, bias=False)
        draw(self, seed, 1 / 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.language_model(x)
        return out


X = torch.ones(1, 1024)


class Scene:
    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.stages: list[Stage] = []
        self._threads: list[threading.Thread] = []

    def connect(self, name: str, **given: Any) -> Stage:
        options = options_of({"swapd": {"endpoint": str(self.daemon.folder), **given}}, name)
        self.stages.append(Stage.connect(options, name, gpu=None))
        return self.stages[-1]

    def stage(self, name: str, seed: int = 0, **given: Any) -> tuple[Stage, Model]:
        stage, model = self.connect(name, **given), Model(seed)
        stage.memory.take({"": model})
        return stage, model

    def meanwhile(self, call: Callable[[], object]) -> threading.Event:
        """Run it in a thread; the event is set when it has returned."""
        done = threading.Event()

        def run() -> None:
            call()
            done.set()

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        return done

    def await_gone(self, stage: Stage) -> None:
        """Wait until the daemon has noticed that the stage's sessions have ended."""
        for opened in self.daemon.watch.seen("SessionOpened"):
            if opened.label == label(stage):
                self.daemon.watch.until_gone(opened.session)

    def close(self) -> None:
        if any(thread.is_alive() for thread in self._threads) and self.daemon.running:
            self.daemon.kill()  # a test failed: this ends all waits
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for stage in self.stages:
            stage.close()


def label(stage: Stage) -> str:
    """The label of its sessions."""
    return f"{stage.name}:{os.getpid()}"


def take_step(stage: Stage, request: str) -> None:
    """A step in which this request is new."""
    stage.note([request], ())
    stage.begin()
    stage.end()


def leases(daemon: Daemon) -> dict[str, int]:
    return {c.name: c.leases for c in daemon.status().components if c.leases}


def await_leases(daemon: Daemon, expected: dict[str, int]) -> None:
    """Wait until exactly these are held: a release may be on its way to the daemon."""
    while leases(daemon) != expected:
        daemon.await_record("Release")


def resident(daemon: Daemon) -> set[str]:
    """The resident components, without workspaces, which may be on their way back."""
    found = {c.name for c in daemon.status().components if c.state not in OUT}
    return {name for name in found if not name.startswith("workspace")}


def wanted(stage: Stage) -> threading.Event:
    """An event, set when a waiter wants the stage's memory, not only queues."""
    event = threading.Event()
    session = stage.client.session
    session.told.when_wanted(lambda: event.set() if session.told.wanted else None)
    return event


# --- steps -------------------------------------------------------------------------------


def test_a_lease_is_kept_from_step_to_step_without_a_message(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, model = scene.stage("thinker")
    expected = Model()(X)
    take_step(stage, "a")

    def no_message() -> Any:
        raise AssertionError("a message was sent")

    with monkeypatch.context() as patched:
        patched.setattr(stage.client.leasing.factory, "channel", no_message)
        for _ in range(10):
            stage.begin()
            with torch.inference_mode():
                assert torch.equal(model(X), expected)
            stage.end()
    assert leases(scene.daemon) == {"thinker": 1}


def test_one_that_computes_does_not_though_it_takes_long(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "IDLE_S", 0.001)
    first, model = scene.stage("thinker")
    second, _ = scene.stage("talker", 1)
    asked = wanted(first)
    first.begin()
    came = scene.meanwhile(second.begin)
    assert asked.wait(PATIENCE_S)
    for _ in range(20):
        with torch.inference_mode():
            model(X)
        assert not came.wait(0.005)
    first.end()
    assert came.wait(PATIENCE_S)
    second.end()


def test_other_calls_hold_all_of_it_also_in_a_step(scene: Scene) -> None:
    stage, model = scene.stage("thinker", cpu_offload_enabled=True)
    stage.begin()
    with stage.using(), stage.using():
        model.visual(torch.ones(1, 512))
    model(X)
    stage.end()
    with pytest.raises(ZeroDivisionError), stage.using():
        raise ZeroDivisionError
    await_leases(scene.daemon, {})


@pytest.mark.parametrize("where", ["gate.await_open", "settle", "window.end"])
def test_after_an_interrupt_where_a_step_may_wait_the_stage_gives_way_as_before(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """For the next daemon, or for an answer."""
    stage, _ = scene.stage("thinker")

    def interrupted() -> None:
        raise KeyboardInterrupt

    def step() -> None:
        try:
            stage.begin()
        finally:
            stage.end()

    with monkeypatch.context() as patched:
        on, _, name = where.rpartition(".")
        patched.setattr(getattr(stage.turns, on) if on else stage.turns, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            step()
    take_step(stage, "a")
    stage.note((), ["a"])
    stage.rest()
    await_leases(scene.daemon, {})


# --- encoders ----------------------------------------------------------------------------


def test_a_step_that_encodes_waits_with_empty_hands(scene: Scene) -> None:
    """Else two stages that each hold memory for the other's encoders would wait for ever."""
    made = [scene.stage(name, n, cpu_offload_enabled=True) for n, name in enumerate("ab")]
    for turn in range(3):
        for stage, model in made:
            stage.note([f"{turn}"], ())
            stage.begin()
            model(X)
            stage.end()
            stage.begin(encoders=True)
            model.audio_tower(torch.ones(1, 512))
            model(X)
            stage.end()
    assert scene.daemon.status().bytes_out == 0


# --- loading -----------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1 << 40, None])
def test_it_has_no_more_than_there_is(scene: Scene, nbytes: int | None) -> None:
    first, _ = scene.stage("thinker", cpu_offload_enabled=False)
    first.begin()
    first.end()
    kept = scene.daemon.component("thinker")
    second = scene.connect("talker")
    with second.memory.loading(nbytes):
        (workspace,) = [c for c in scene.daemon.status().components if "workspace" in c.name]
    status = scene.daemon.status()
    assert workspace.nbytes <= status.budget_bytes - kept.nbytes
    assert workspace.nbytes + kept.nbytes > status.budget_bytes - status.chunk_bytes
    assert resident(scene.daemon) == {"thinker"}


def test_after_an_error_the_memory_is_given_back(scene: Scene) -> None:
    stage = scene.connect("thinker")
    with pytest.raises(ZeroDivisionError), stage.memory.loading(MIB):
        raise ZeroDivisionError
    scene.daemon.await_record("Reclaimed")


def test_taking_says_how_much_and_in_words_what_becomes_of_it(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "swapd_client")
    stage, model = scene.connect("thinker", cpu_offload_enabled=True), Model()
    assert stage.memory.take({"": model}) == 10 * MIB
    said = caplog.messages[-1]
    assert said.startswith(f"in swapd at {scene.daemon.folder}: ")
    assert "thinker (8 MiB) takes turns" in said
    assert "thinker.visual (1 MiB) is loaded for steps with encoder inputs" in said


@pytest.mark.parametrize("taken", ["thinker", "thinker.visual"])
def test_a_stage_whose_name_is_taken_is_told_what_to_do_and_is_as_it_was(
    scene: Scene, taken: str
) -> None:
    """What it had moved already is in its own memory again."""
    with connect(scene.daemon.folder) as other:
        other.register(taken, {"a": torch.ones(3)})
        stage, model = scene.connect("thinker", cpu_offload_enabled=True), Model()
        with pytest.raises(DuplicateName, match=r"\{swapd: \{component: \.\.\.\}\}"):
            stage.memory.take({"": model})
        assert {c.name for c in scene.daemon.status().components} == {taken}
        assert torch.equal(model(X), Model()(X))


def test_a_stage_that_does_not_fit_is_told_what_would(scene: Scene) -> None:
    model = nn.ModuleDict({str(n): nn.Linear(1024, ROWS, bias=False) for n in range(3)})
    with pytest.raises(TooLarge, match=r"--budget of 24MiB at least, or have layers stream, with"):
        scene.connect("thinker").memory.take({"": model})
    assert scene.daemon.status().components == ()


def test_a_stage_whose_cache_does_not_fit_beside_its_weights_is_told_how_much_would(
    scene: Scene,
) -> None:
    status = scene.daemon.status()
    chunk, budget = status.chunk_bytes, status.budget_bytes
    stage, model = scene.connect("thinker"), Model()
    weights = -(-stage.memory.take({"": model}) // chunk) * chunk
    terms = KvTerms("drop", prefixes=False, layers=[Layer(0, budget)])
    with pytest.raises(TooLarge) as refused:
        stage.memory.lend_cache(budget, terms)
    said = str(refused.value)
    assert f"its KV cache of {size(budget)} at once" in said
    assert f"a --budget of {(budget + weights) // MIB}MiB at least" in said
    assert f"a kv_cache_memory_bytes of {budget - weights} at most" in said
    stage.memory.lend_cache(budget - weights, terms)
    with stage.using():
        assert torch.equal(model(X), Model()(X))


# --- the daemon --------------------------------------------------------------------------


def test_a_daemon_that_is_stopped_while_a_stage_waits_does_not_stop_it(scene: Scene) -> None:
    first, _ = scene.stage("thinker")
    second, model = scene.stage("talker", 1)
    first.begin()
    came = scene.meanwhile(second.begin)
    scene.daemon.await_record("Waiting")
    scene.daemon.terminate()
    assert came.wait(PATIENCE_S)
    with torch.inference_mode():
        assert torch.equal(model(X), Model(1)(X))
    second.end()
    first.end()
    assert scene.daemon.wait() == 0


def test_closing_leaves_private_memory_and_is_done_once(scene: Scene) -> None:
    stage, model = scene.stage("thinker")
    take_step(stage, "a")
    stage.close()
    stage.close()
    assert torch.equal(model(X), Model()(X))
    scene.await_gone(stage)
    assert not scene.daemon.status().components


# --- the log -----------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_each_turn_is_in_the_log_in_words(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "swapd_client")
    first, _ = scene.stage("thinker")
    second, _ = scene.stage("talker", 1)
    take_step(first, "before")
    first.note((), ["before"])
    first.rest()
    with second.using():
        caplog.clear()
    asked = wanted(first)
    first.note(["a", "b"], ())
    first.begin()
    first.end()
    came = scene.meanwhile(second.begin)
    assert asked.wait(PATIENCE_S)
    first.note((), ["a", "b"])
    first.rest()
    assert came.wait(PATIENCE_S)
    second.end()
    said = " | ".join(caplog.messages)
    assert "thinker is loaded, after " in said
    assert "thinker gives way after 2 requests, " in said
    assert "talker is loaded, after " in said


# --- new weights -------------------------------------------------------------------------


def double(model: nn.Module, *, fail: bool = False) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    if fail:
        raise ZeroDivisionError


def test_new_weights_are_at_the_addresses_of_the_old_ones(scene: Scene) -> None:
    stage, model = scene.stage("thinker", cpu_offload_enabled=True)
    expected = Model()(X) * 2
    take_step(stage, "a")
    addresses = [p.data_ptr() for p in model.parameters()]
    with stage.memory.changing():
        assert not leases(scene.daemon).keys() & {"thinker", "thinker.visual"}
        double(model)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    stage.begin()
    assert torch.equal(model(X), expected)
    stage.end()
    stage.close()
    assert torch.equal(model(X), expected)


def test_weights_change_when_no_other_stage_starts(scene: Scene) -> None:
    stage, model = scene.stage("thinker")
    expected = Model()(X) * 2

    def change() -> None:
        with stage.memory.changing():
            double(model)

    with swapd_client.connect(scene.daemon.folder, label="other") as other:
        with other.acquire_start():
            done = scene.meanwhile(change)
            while len(other.status().starting) < 2:
                pass
            assert not scene.daemon.watch.seen("Lend"), "it would count as taken, or as free"
            assert not done.is_set()
        assert done.wait(PATIENCE_S)
        assert scene.daemon.watch.seen("Lend")
        assert other.status().starting == ()
    with stage.using():
        assert torch.equal(model(X), expected)


def test_a_change_that_fails_changes_nothing(scene: Scene) -> None:
    stage, model = scene.stage("thinker")
    with pytest.raises(ZeroDivisionError), stage.memory.changing():
        double(model, fail=True)
    with stage.using():
        assert torch.equal(model(X), Model()(X))


def test_nor_does_one_of_another_shape(scene: Scene) -> None:
    stage, model = scene.stage("thinker", cpu_offload_enabled=True)

    def change() -> None:
        with stage.memory.changing():
            double(model)
            model.visual.weight.data = torch.ones(3)

    with pytest.raises(InvalidSource, match=r"visual\.weight"):
        change()
    with stage.using():
        assert torch.equal(model(X), Model()(X))


def test_what_wraps_others_cannot_be_changed_and_says_so(scene: Scene) -> None:
    stage = scene.connect("thinker")
    model = nn.Module()
    model.weight = nn.Parameter(Scaled(torch.ones(2), torch.ones(1)), requires_grad=False)
    stage.memory.take({"": model})
    with pytest.raises(InvalidSource, match="'weight' is a Scaled"), stage.memory.changing():
        raise AssertionError


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_weights_can_be_changed_though_the_daemon_is_gone(scene: Scene, when: str) -> None:
    stage, model = scene.stage("thinker")
    ended = threading.Event()
    stage.client.session.life.when_ended(lambda _: ended.set())
    if when == "before":
        scene.daemon.kill()
        assert ended.wait(PATIENCE_S)
    with stage.memory.changing():
        if when == "meanwhile":
            scene.daemon.kill()
            assert ended.wait(PATIENCE_S)
        double(model)
    assert torch.equal(model(X), Model()(X) * 2)


@pytest.mark.parametrize("step", ["acquire_start", "acquire_workspace"])
def test_nor_does_a_daemon_that_dies_as_a_change_begins_stop_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    stage, model = scene.stage("thinker")
    acquire = getattr(stage.client, step)

    def then(*args: int) -> Lease:
        scene.daemon.kill()
        return cast("Lease", acquire(*args))

    monkeypatch.setattr(stage.client, step, then)
    with stage.memory.changing():
        double(model)
    assert stage.alone
    assert torch.equal(model(X), Model()(X) * 2)


def test_a_change_that_fails_changes_nothing_though_the_daemon_is_gone(scene: Scene) -> None:
    stage, model = scene.stage("thinker")
    ended = threading.Event()
    stage.client.session.life.when_ended(lambda _: ended.set())
    scene.daemon.kill()
    assert ended.wait(PATIENCE_S)
    with pytest.raises(ZeroDivisionError), stage.memory.changing():
        double(model, fail=True)
    assert torch.equal(model(X), Model()(X))


def test_weights_that_are_nowhere_are_not_changed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, _ = scene.stage("thinker")
    ended = threading.Event()
    stage.client.session.life.when_ended(lambda _: ended.set())

    def no_room() -> None:
        warnings.warn("the GPU has no room for private copies", RuntimeWarning, stacklevel=2)

    with monkeypatch.context() as full:
        full.setattr(stage.client, "close", no_room)
        scene.daemon.kill()
        assert ended.wait(PATIENCE_S)
        for _ in range(2):
            with pytest.raises(Stopped, match="Start swapd again"), stage.memory.changing():
                raise AssertionError
