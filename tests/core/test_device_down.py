"""On a device that is down, the core grants resident components, and tries nothing else."""

from typing import Any

import pytest

from swapd.core import Residency
from swapd.core.actions import AnyAction, CopyIn, Evict, Lend
from swapd.core.events import AnyEvent
from tests.core import driver
from tests.core.driver import RandomChoices
from tests.core.world import World

LOST = "cuda:0 is lost: CUDA_ERROR_LAUNCH_FAILED (719) in cuMemcpyHtoDAsync"


class LosingWorld(World):
    """Checks after every event that the core orders nothing in vain from a device that is down."""

    def lose(self, why: str = LOST) -> None:
        super().lose(why)

    def send(self, event: AnyEvent) -> list[AnyAction]:
        out = super().send(event)
        for action in out if self.down else ():
            assert not isinstance(action, CopyIn | Lend), f"{event} orders {action}"
            if isinstance(action, Evict):
                assert action.reason in ("unregister", "update", "failed"), (
                    f"{event} orders {action}"
                )
        return out


def world(**rules: Any) -> tuple[LosingWorld, int]:
    """10 chunks with two components of 4 on them, and one of 4 that is absent."""
    w = LosingWorld(10, residency_factor=0.0, **rules)
    s = w.open()
    for name in ("on", "also", "off"):
        w.register(s, name, 4)
    w.touch(s, "on")
    w.touch(s, "also")
    return w, s


def test_what_is_on_the_device_is_granted_and_the_rest_refused_with_what_to_do() -> None:
    w, s = world()
    w.lose()
    assert w.granted(w.acquire(s, "on"), w.acquire(s, "also"))
    for key in (
        w.acquire(s, "off"),
        w.acquire(s, "on", "off"),
        w.workspace(s, 1),
        w.prefetch(s, "off"),
    ):
        refusal = w.refusal(key)
        assert refusal.code == "device_failed"
        assert LOST in refusal.message
        assert "until swapd is restarted" in refusal.message
    assert w.evictions() == []


def test_who_waits_for_room_is_refused_and_holders_are_wanted_no_more() -> None:
    w, s = world()
    held = w.acquire(s, "on", "also")
    waiting = w.acquire(w.open(), "off")
    w.lose()
    assert w.refusal(waiting).code == "device_failed"
    assert not w.wanted
    w.release(held)
    assert w.granted(w.acquire(s, "on"))


def test_a_load_under_way_fails_without_a_word_of_trying_again() -> None:
    w, s = world()
    key = w.acquire(s, "off")
    w.lose()
    w.move("off", fail=LOST)
    message = w.refusal(key).message
    assert "still in host memory" in message
    assert "until swapd is restarted" in message
    assert "try again" not in message


def test_what_is_sequential_stays_for_it_could_not_come_back() -> None:
    w = LosingWorld(10)
    s = w.open()
    w.register(s, "a", 4, policy="sequential")
    key = w.acquire(s, "a")
    w.settle()
    w.lose()
    w.release(key)
    assert w.granted(w.acquire(s, "a"))


def test_what_cannot_be_written_back_stays_and_who_waits_for_it_gets_it() -> None:
    w = LosingWorld(10, residency_factor=0.0)
    s, t = w.open(), w.open()
    w.register(s, "written", 6, mutable=True)
    w.register(t, "other", 6)
    w.touch(s, "written")
    other = w.acquire(t, "other")
    (generation,) = w.acks
    w.end_ack(generation)
    again = w.acquire(s, "written")
    w.lose()
    for copy in w.copies():
        if isinstance(copy, CopyIn):
            w.end_move(copy.generation, LOST)
    for copy in w.copies():
        w.end_move(copy.generation, LOST)
    assert w.refusal(other).code == "device_failed"
    assert w.granted(again)


def test_an_unregistration_that_cannot_save_is_refused_and_leaves_it_there() -> None:
    w = LosingWorld(10)
    s = w.open()
    w.register(s, "written", 6, mutable=True)
    w.touch(s, "written")
    w.lose()
    key = w.unregister(s, "written")
    (generation,) = w.acks
    w.end_ack(generation)
    w.end_move(generation, LOST)
    assert w.refusal(key).code == "device_failed"
    assert w.granted(w.acquire(s, "written"))


@pytest.mark.parametrize("strict", [False, True])
def test_every_wait_ends_whenever_the_device_goes_down(strict: bool) -> None:
    bag = [move for move, often in driver.MOVES.items() for _ in range(often)]
    for seed in driver.seeds(25):
        w = LosingWorld(10, Residency, strict=strict, residency_bound_s=0.5)
        choose = RandomChoices(seed)
        for _ in range(2):
            w.open()
        for _ in range(6):
            driver.register(w, choose)
        for step in range(100):
            if step == 20 + seed % 40:
                w.lose()
            choose.pick(bag)(w, choose)
        driver.wind_up(w)
