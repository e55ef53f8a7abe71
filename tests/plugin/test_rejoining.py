"""A stage registers again between two calls when its daemon has restarted. Without vLLM."""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import nn

import swapd_client
from swapd_client import Client, NotRunning, OutOfMemory, VersionMismatch, connect
from swapd_client.memory.part import Part
from swapd_client.memory.place import Place
from swapd_client.session.registry import Registry
from swapd_client.vllm.stage import Stage, rejoining
from swapd_client.vllm.stage.kv_cache import KvTerms, Layer
from swapd_client.vllm.stage.rejoining import Rejoining
from tests.guarantees.harness import MIB, PATIENCE_S, Daemon
from tests.plugin.test_stage import Model, Scene, X, label


class Lives(Scene):
    """Daemons in one folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.all = [Daemon(folder / "d", folder / "log")]
        super().__init__(self.all[0])

    def restart(self, **settings: object) -> Daemon:
        """Kill the daemon, and start the next one."""
        self.daemon.kill()
        self.daemon = Daemon(self.daemon.folder, self.daemon.folder.parent / "log", **settings)
        self.all.append(self.daemon)
        return self.daemon

    def bring_back(self, *back: Stage) -> Daemon:
        """Restart the daemon, and wait until these have registered everything with it."""
        daemon = self.restart()
        self.await_back(*back)
        return daemon

    def await_connected(self, stage: Stage) -> None:
        """Wait until it has a session with the present daemon, whether or not it joins yet."""
        self.daemon.await_record("SessionOpened", label=label(stage))

    def await_back(self, *back: Stage) -> None:
        """Wait until they have registered everything with the present daemon."""
        names = {stage.name for stage in back}
        while names:
            names.discard(self.daemon.await_record("Commit").name.partition("/")[0])
        for stage in back:
            with stage._gate.lock:  # held until everything is registered
                assert not stage.alone


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lives]:
    monkeypatch.setattr(rejoining, "LOOK_S", 0.01)
    monkeypatch.setattr(rejoining, "LOOK_LAST_S", 0.1)
    folder = Path(tempfile.mkdtemp(prefix="swapd-", dir="/tmp"))
    made = Lives(folder)
    try:
        yield made
        made.close()
        for daemon in made.all:
            daemon.close()
    finally:
        for daemon in made.all:
            daemon.discard()
        shutil.rmtree(folder)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[Exception]:
    """The errors with which stages could not join, each once it was reported."""
    could_not, found = Rejoining._could_not_join, SimpleQueue[Exception]()

    def noted(one: Rejoining, error: Exception) -> None:
        could_not(one, error)
        found.put(error)

    monkeypatch.setattr(Rejoining, "_could_not_join", noted)
    return found


def step(stage: Stage, model: Model, seed: int = 0, **options: Any) -> None:
    """Make one step, and check its result."""
    stage.begin(**options)
    try:
        with torch.inference_mode():
            assert torch.equal(model(X), Model(seed)(X))
    finally:
        stage.end()


def addresses(model: Model) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def gone(stage: Stage) -> threading.Event:
    event = threading.Event()
    stage.client.session.life.when_ended(lambda _: event.set())
    return event


class HeldBack:
    """Holds back the registration of components with the next daemon until the test lets it go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.let_go = threading.Event(), threading.Event()
        fill = Registry.fill

        def held(registry: Registry, part: Part) -> None:
            self.reached.set()
            assert self.let_go.wait(PATIENCE_S)
            fill(registry, part)

        monkeypatch.setattr(Registry, "fill", held)


# --- where not all weights fit without a daemon, as on a GPU ----------------------------------


def waiting(lives: Lives, name: str, wait_s: float = PATIENCE_S, **how: Any) -> tuple[Stage, Model]:
    stage, model = lives.stage(name, **how)
    stage.connection.wait_s = wait_s
    return stage, model


def is_held_off(stage: Stage) -> bool:
    """Wait until a call is outside the gate."""
    while not (stage._gate.shut and not stage._gate.depth):
        pass
    return not stage.alone


def test_a_call_waits_for_the_next_daemon_where_not_all_weights_fit(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    (one, model), (two, other) = waiting(lives, "thinker"), waiting(lives, "talker", seed=1)
    before = addresses(model)
    step(one, model)
    ended = gone(one), gone(two)
    lives.daemon.kill()
    assert all(event.wait(PATIENCE_S) for event in ended)
    done = lives.meanwhile(lambda: step(one, model)), lives.meanwhile(lambda: step(two, other, 1))
    assert is_held_off(one)
    assert is_held_off(two)
    lives.restart()
    assert all(event.wait(PATIENCE_S) for event in done)
    assert not any(stage.alone for stage in (one, two))
    assert addresses(model) == before
    assert not any("goes on without swapd" in message for message in caplog.messages)
    assert any("its calls wait" in message for message in caplog.messages)
    lives.bring_back(one, two)
    step(two, other, 1)


def test_an_upgrade_is_a_pause_where_not_all_weights_fit(
    lives: Lives, caplog: pytest.LogCaptureFixture
) -> None:
    (one, model), (two, other) = waiting(lives, "thinker"), waiting(lives, "talker", seed=1)
    one.note(["a"], ())
    step(one, model)
    assert one.turns.held
    ended = gone(one), gone(two)
    lives.daemon.upgrade()
    assert all(event.wait(PATIENCE_S) for event in ended)
    for _ in range(2):
        step(two, other, 1)
        step(one, model)
        one.note((), ["a"])
    assert not any("goes on without swapd" in message for message in caplog.messages)


def test_a_step_under_way_ends_with_the_weights_it_holds(lives: Lives) -> None:
    stage, model = waiting(lives, "thinker")
    stage.begin()
    ended = gone(stage)
    lives.daemon.kill()
    assert ended.wait(PATIENCE_S)
    with torch.inference_mode():
        assert torch.equal(model(X), Model(0)(X))
    stage.end()
    lives.restart()
    step(stage, model)
    assert not stage.alone


def test_without_the_next_daemon_the_stage_goes_alone_after_a_while(lives: Lives) -> None:
    stage, model = waiting(lives, "thinker", wait_s=0.1)
    lives.daemon.kill()
    step(stage, model)
    assert stage.alone
    lives.bring_back(stage)
    step(stage, model)


def test_without_memory_for_its_weights_the_stage_waits_on(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage, model = waiting(lives, "thinker")
    monkeypatch.setattr(Place, "set_memory_aside", Mock(side_effect=OutOfMemory("no room")))
    lives.daemon.kill()
    done = lives.meanwhile(lambda: step(stage, model))
    while not stage.connection.left:
        assert not done.is_set()
    stage.connection.wait_s = stage.connection._waits_until = 0.1
    while sum("its calls wait on" in message for message in caplog.messages) < 2:
        assert not done.is_set()
    lives.restart()
    assert done.wait(PATIENCE_S)
    assert not stage.alone


def test_one_that_the_next_daemon_refuses_waits_for_another(
    lives: Lives, refusals: SimpleQueue[Exception]
) -> None:
    stage, model = waiting(lives, "thinker")
    before = addresses(model)
    lives.restart(budget="4MiB")
    done = lives.meanwhile(lambda: step(stage, model))
    assert "4 MiB" in str(refusals.get(timeout=PATIENCE_S))
    assert is_held_off(stage)
    lives.restart()
    assert done.wait(PATIENCE_S)
    assert addresses(model) == before


@pytest.mark.parametrize("held", [True, False], ids=["in a turn", "between turns"])
def test_a_kv_cache_that_waits_has_its_contents(
    lives: Lives, monkeypatch: pytest.MonkeyPatch, refusals: SimpleQueue[Exception], held: bool
) -> None:
    stage, model = waiting(lives, "thinker")
    cache = stage.memory.lend_cache(MIB, KvTerms("auto", prefixes=False, layers=[Layer(0, 1024)]))
    assert stage.components.cache is not None
    stage.note(["a"], ())
    stage.begin()
    stage.components.cache.in_use.has("a", ([1],))
    cache[1024:2048] = 7
    stage.end()
    if not held:
        with stage._gate.lock:
            stage.turns.end()
    ended = gone(stage)
    lives.daemon.kill()
    assert ended.wait(PATIENCE_S)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(swapd_client, "connect", Mock(side_effect=NotRunning("not yet")))
        taken = connect(lives.restart().folder)
        taken.register("thinker.kv", {"x": b"x"})  # all or nothing joins
    done = lives.meanwhile(stage.begin)
    assert "'thinker.kv' is registered already" in str(refusals.get(timeout=PATIENCE_S))
    assert is_held_off(stage)
    taken.close()
    assert done.wait(PATIENCE_S)
    assert not stage.alone
    with torch.inference_mode():
        assert torch.equal(model(X), Model(0)(X))
    assert bool((cache[1024:2048] == 7).all())
    assert not stage.components.losses
    stage.end()


def test_a_stage_that_is_closed_keeps_no_call_waiting(lives: Lives) -> None:
    stage, model = waiting(lives, "thinker")
    ended = gone(stage)
    lives.daemon.kill()
    assert ended.wait(PATIENCE_S)
    done = lives.meanwhile(lambda: step(stage, model))
    assert is_held_off(stage)
    stage.close()
    assert done.wait(PATIENCE_S)


# --- between requests -----------------------------------------------------------------------


def test_requests_in_flight_finish_first(lives: Lives) -> None:
    stage, model = lives.stage("thinker", finish_within_s=PATIENCE_S)
    ended = gone(stage)
    stage.note(["a"], ())
    step(stage, model)
    daemon = lives.restart()
    assert ended.wait(PATIENCE_S)
    lives.await_connected(stage)
    for _ in range(3):
        step(stage, model)
        assert stage.alone
    stage.note((), ["a"])
    stage.rest()
    lives.await_back(stage)
    step(stage, model)
    assert daemon.component("thinker").loads == 1


def test_a_stage_with_requests_in_every_step_comes_back_between_two(lives: Lives) -> None:
    stage, model = lives.stage("thinker", finish_within_s=0.1)
    enough, steps = threading.Event(), [0]

    def serve() -> None:
        while not enough.is_set():
            stage.note([f"{steps[0]}"], [f"{steps[0] - 1}"])
            step(stage, model)
            steps[0] += 1
        stage.note((), [f"{steps[0] - 1}"])
        stage.rest()

    before = addresses(model)
    served = lives.meanwhile(serve)
    second, other = lives.stage("talker", 1)
    daemon = lives.bring_back(stage, second)
    step(second, other, 1)
    enough.set()
    assert served.wait(PATIENCE_S)
    assert addresses(model) == before
    assert steps[0] > 1
    assert daemon.status().evictions >= 1


def test_what_a_stage_has_written_alone_to_its_cache_comes_back_with_it(lives: Lives) -> None:
    stage, model = lives.stage("thinker", finish_within_s=0)
    cache = stage.memory.lend_cache(MIB, KvTerms("auto", prefixes=False, layers=[Layer(0, 1024)]))
    assert stage.components.cache is not None
    step(stage, model)  # no request is in flight, so nothing of the cache is saved
    stage.client.evict("thinker.kv")
    while not stage.components.cache.component.lost:
        pass
    ended = gone(stage)
    lives.daemon.kill()
    assert ended.wait(PATIENCE_S)
    stage.note(["a"], ())
    stage.begin()
    stage.components.cache.in_use.has("a", ([1],))
    cache[1024:2048] = 7
    stage.end()
    lives.bring_back(stage)
    step(stage, model)
    assert bool((cache[1024:2048] == 7).all())
    assert not stage.components.losses


def test_a_call_that_begins_meanwhile_waits_for_it(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, model = lives.stage("thinker")
    held = HeldBack(monkeypatch)
    daemon = lives.restart()
    assert held.reached.wait(PATIENCE_S)
    done = lives.meanwhile(lambda: step(stage, model))
    assert not done.wait(0.05)
    held.let_go.set()
    assert done.wait(PATIENCE_S)
    assert not stage.alone
    assert daemon.component("thinker").loads == 1


@pytest.mark.parametrize("why", ["name taken", "too large", "version", "unforeseen"])
def test_one_that_cannot_come_back_says_so_once_and_goes_on(
    lives: Lives,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refusals: SimpleQueue[Exception],
    why: str,
) -> None:
    stage, model = lives.stage("thinker")
    before = addresses(model)
    said = {"name taken": "is registered", "too large": "4 MiB"}.get(why, "injected")
    error = VersionMismatch(said) if why == "version" else OSError(said)

    there = threading.Event()

    def fail(*_: object, **__: object) -> Client:
        raise error if there.is_set() else NotRunning("the next daemon has not started yet")

    with monkeypatch.context() as meanwhile:
        if said == "injected":
            meanwhile.setattr(swapd_client, "connect", fail)
        with stage.computing():  # until the name is taken
            daemon = lives.restart(budget="4MiB" if why == "too large" else "16MiB")
            there.set()
            other = connect(daemon.folder)
            if why == "name taken":
                other.register("thinker", {"x": b"x"})
                daemon.await_record("Commit", name="thinker")
        for _ in range(3):
            refusals.get(timeout=PATIENCE_S)
        step(stage, model)
        assert addresses(model) == before
        told = [m for m in caplog.messages if m.startswith("thinker cannot come back to swapd")]
        assert len(told) == 1
        assert said in told[0]
        other.close()
    if why == "too large":
        lives.restart()
    lives.await_back(stage)
    step(stage, model)
    assert addresses(model) == before


@pytest.mark.parametrize("wait_s", [0.0, 0.5], ids=["alone at once", "alone after a while"])
def test_one_that_stays_does_not_come_back_where_that_takes_anothers_room_for_good(
    lives: Lives, refusals: SimpleQueue[Exception], wait_s: float
) -> None:
    first, model = lives.stage("thinker")
    late, other = lives.connect("code2wav", cpu_offload_enabled=False), Model(1)
    late.connection.wait_s = wait_s
    late.memory.take({"": nn.ModuleList([other.visual, other.audio_tower])})
    with late.computing():
        daemon = lives.restart(budget="10MiB")
        lives.await_back(first)
        step(first, model)
    error = refusals.get(timeout=PATIENCE_S)
    assert "stage 'code2wav' would stay, and leave thinker no room for its turn" in str(error)
    while {c.name for c in daemon.status().components} != {"thinker"}:
        daemon.await_record("SessionGone")  # the one of the refused stage, each time
    step(first, model)
    with late.computing():  # else it may try to join just then, without its weights
        assert torch.equal(other.visual(X[:, :512]), Model(1).visual(X[:, :512]))


def test_a_daemon_that_dies_while_a_stage_comes_back_leaves_it_as_it_was(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, model = lives.stage("thinker", cpu_offload_enabled=True)
    before = addresses(model)
    held = HeldBack(monkeypatch)
    lives.restart()
    assert held.reached.wait(PATIENCE_S)
    lives.daemon.kill()
    held.let_go.set()
    step(stage, model)
    assert stage.alone
    assert addresses(model) == before
    lives.bring_back(stage)
    step(stage, model)
    assert addresses(model) == before


def test_closing_ends_it_and_leaves_private_memory(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, model = lives.stage("thinker")
    before = addresses(model)
    held = HeldBack(monkeypatch)
    daemon = lives.restart()
    assert held.reached.wait(PATIENCE_S)
    closed = lives.meanwhile(stage.close)
    stage.connection.closed.wait(PATIENCE_S)
    held.let_go.set()
    assert closed.wait(PATIENCE_S)
    assert addresses(model) == before
    assert torch.equal(model(X), Model()(X))
    lives.await_gone(stage)
    assert not daemon.status().components


def test_closing_a_stage_that_is_just_refused_waits_for_that(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both close the client of the daemon that refused it, and two at once would raise."""
    stage, model = lives.stage("thinker")
    first, second, let_go = threading.Event(), threading.Event(), threading.Event()
    close = Client.close

    def held(client: Client, **how: bool) -> None:
        if client is stage._rejoining._newcomer:
            (second if first.is_set() else first).set()
            assert let_go.wait(PATIENCE_S)
        close(client, **how)

    monkeypatch.setattr(Client, "close", held)
    lives.restart(budget="4MiB")
    assert first.wait(PATIENCE_S)
    closed = lives.meanwhile(stage.close)
    assert stage.connection.closed.wait(PATIENCE_S)
    assert not second.wait(0.05)
    let_go.set()
    assert closed.wait(PATIENCE_S)
    assert torch.equal(model(X), Model()(X))


@pytest.mark.parametrize("fails", [False, True])
def test_weights_that_are_changed_meanwhile_come_back_changed(lives: Lives, fails: bool) -> None:
    stage, model = lives.stage("thinker", cpu_offload_enabled=True)
    before = addresses(model)

    def change() -> None:
        with stage.memory.changing(), torch.no_grad():
            lives.restart()
            lives.await_connected(stage)
            if fails:
                raise ZeroDivisionError
            for parameter in model.parameters():
                parameter.mul_(2)
            assert not lives.daemon.status().components

    if fails:
        with pytest.raises(ZeroDivisionError):
            change()
    else:
        change()
    lives.await_back(stage)
    with stage.using():
        assert torch.equal(model(X), Model()(X) * (1 if fails else 2))
    assert addresses(model) == before


def test_the_next_daemon_is_asked_at_once_whatever_the_last_one_said(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rejoining, "LOOK_LAST_S", 2 * PATIENCE_S)
    stage, model = lives.stage("thinker")
    told = threading.Event()
    could_not = Rejoining._could_not_join

    def refused(one: Rejoining, error: Exception) -> None:
        could_not(one, error)
        one._refusals.ask_at += 2 * PATIENCE_S
        told.set()

    monkeypatch.setattr(Rejoining, "_could_not_join", refused)
    lives.restart(budget="4MiB")
    assert told.wait(PATIENCE_S)
    lives.bring_back(stage)
    step(stage, model)


def test_a_daemon_of_another_device_is_none_of_its_own(
    lives: Lives, refusals: SimpleQueue[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    stage, model = lives.stage("thinker")
    with stage.computing():
        stage.client.session.welcome = _on_a_gpu(stage.client.session.welcome)
        lives.restart()
    refusals.get(timeout=PATIENCE_S)
    assert "serves host, but the weights are on cuda:0" in caplog.text
    step(stage, model)


def _on_a_gpu(welcome: Any) -> Any:
    return msgspec.structs.replace(welcome, device="cuda:0")


def test_a_stage_that_asks_while_the_daemon_stops_comes_back_to_the_next(lives: Lives) -> None:
    """The daemon still waits for another process's lease, so this session has not ended."""
    stage, model = lives.stage("thinker")
    expected = Model()(X)
    with connect(lives.daemon.folder) as other:
        other.register("held", {"w": torch.zeros(1024)})
        held = other.acquire("held")
        os.kill(lives.daemon.pid, signal.SIGTERM)
        lives.daemon.await_record("Stopping")
        stage.begin()
        assert stage.alone
        with torch.inference_mode():
            assert torch.equal(model(X), expected)
        stage.end()
        held.release()
    lives.bring_back(stage)
    with stage.using(), torch.inference_mode():
        assert torch.equal(model(X), expected)
