"""vLLM's sleep mode: a stage that sleeps has left the device, and nobody waits for it.

On a real strict daemon with room for one stage. Without vLLM.
"""

import logging

import pytest
import torch

from swapd_client.vllm.stage import Stage
from swapd_client.vllm.stage.kv_cache import Fate, KvTerms, Layer
from tests.guarantees.harness import MIB, Daemon
from tests.plugin import test_rejoining
from tests.plugin.test_rejoining import Lives, addresses, gone, step
from tests.plugin.test_stage import (
    PATIENCE_S,
    Model,
    Scene,
    X,
    await_leases,
    resident,
)

lives = test_rejoining.lives

BLOCK = MIB


def with_cache(scene: Scene, name: str, fate: Fate) -> tuple[Stage, Model]:
    """A stage that has computed a step of request "a", whose cache has one block of ones."""
    stage, model = scene.stage(name, kv=fate)
    terms = KvTerms(fate, prefixes=False, layers=[Layer(0, BLOCK)])
    cache = stage.memory.lend_cache(4 * BLOCK, terms)
    stage.note(["a"], ())
    stage.begin()
    assert stage.components.cache is not None
    stage.components.cache.in_use.has("a", ([1],))
    cache.fill_(1)
    stage.end()
    return stage, model


def await_off(daemon: Daemon) -> None:
    while resident(daemon):
        daemon.await_record("Evicted")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fate", ["drop", "auto"])
def test_requests_that_slept_are_in_flight_again(scene: Scene, fate: Fate) -> None:
    stage, model = with_cache(scene, "thinker", fate)
    for _ in range(2):
        stage.sleep()
        await_off(scene.daemon)
    assert scene.daemon.component("thinker.kv").loads == 1
    stage.wake_up()
    step(stage, model)
    await_leases(scene.daemon, {"thinker": 1, "thinker.kv": 1})
    stage.note((), ["a"])
    stage.rest()
    await_leases(scene.daemon, {})


@pytest.mark.usefixtures("patient")
def test_requests_that_end_in_its_sleep_are_not(scene: Scene) -> None:
    """vLLM tells of a request whose client has left though it schedules nothing meanwhile."""
    stage, _ = with_cache(scene, "thinker", "drop")
    stage.sleep()
    stage.note((), ["a"])
    stage.rest()
    stage.wake_up()
    assert not stage.turns.held, "others would wait for its end for ever"


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("fate", ["drop", "auto"])
def test_a_call_in_its_sleep_keeps_nothing(scene: Scene, fate: Fate) -> None:
    stage, model = with_cache(scene, "thinker", fate)
    stage.sleep()
    with stage.using(), torch.inference_mode():
        assert torch.equal(model(X), Model()(X))
    await_leases(scene.daemon, {})


def test_a_cache_alone_can_sleep(scene: Scene) -> None:
    stage, model = with_cache(scene, "thinker", "auto")
    stage.sleep(["kv_cache"])
    while resident(scene.daemon) != {"thinker"}:
        scene.daemon.await_record("Evicted")
    stage.wake_up()
    step(stage, model)
    assert stage.components.losses == 1


@pytest.mark.usefixtures("patient")
def test_it_wakes_up_in_the_next_turn(scene: Scene) -> None:
    stage, model = with_cache(scene, "thinker", "auto")
    other, _ = scene.stage("talker", 1)
    stage.sleep()
    other.note(["b"], ())
    other.begin()
    awake = scene.meanwhile(stage.wake_up)
    scene.daemon.await_record("Waiting")
    assert not awake.is_set()
    other.note((), ["b"])
    other.end()
    assert awake.wait(PATIENCE_S)
    assert {"thinker", "thinker.kv"} <= resident(scene.daemon)
    step(stage, model)


def test_what_stays_by_its_settings_is_named(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "swapd_client")
    stage, model = scene.stage("thinker", cpu_offload_enabled=False)
    step(stage, model)
    stage.sleep()
    assert caplog.messages[-1].endswith("; on the device stays thinker")
    assert resident(scene.daemon) == {"thinker"}


@pytest.mark.parametrize("fate", ["drop", "auto"])
@pytest.mark.parametrize("again", [True, False], ids=["it comes back", "it wakes alone"])
def test_a_daemon_may_die_while_a_stage_sleeps(lives: Lives, fate: Fate, *, again: bool) -> None:
    stage, model = with_cache(lives, "thinker", fate)
    before = addresses(model)
    stage.sleep()
    ended = gone(stage)
    if again:
        lives.bring_back(stage)
        assert not resident(lives.daemon)
    else:
        lives.daemon.kill()
    assert ended.wait(PATIENCE_S)
    stage.wake_up()
    step(stage, model)
    assert addresses(model) == before
    assert stage.components.losses, "what it read is computed again"
    stage.sleep()
    stage.wake_up()
    step(stage, model)
