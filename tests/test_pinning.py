"""A few lines report the progress of pinning, at any pace, and always its end."""

import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from swapd.core.events import AnyEvent, HostCopiesPinned
from swapd.daemon.pinning import PERIOD_S, Pinning
from swapd.device.base import Pinned

GIB = 1 << 30


class Clock:
    """Simulated time and timers; and simulated progress of pinning."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.to_pin_bytes = self.done = self.pinning = 0
        self.rate = GIB
        self.refused = ""
        self.needs_pins = True
        self.posted: list[HostCopiesPinned] = []

    def pinned(self) -> Pinned | None:
        return Pinned(self.done, self.refused) if self.needs_pins else None

    def call_later(self, span_s: float, call: Callable[[], None]) -> "Clock":
        self.due.append((self.now + span_s, call))
        return self

    def cancel(self) -> None:
        self.due.clear()

    def post(self, event: AnyEvent) -> None:
        assert isinstance(event, HostCopiesPinned)
        self.posted.append(event)

    def register(self, nbytes: int) -> None:
        self.to_pin_bytes += nbytes
        self.pinning += 1

    def run(self, span_s: float) -> None:
        """Pins a GiB each second, as long as any are left."""
        until = self.now + span_s
        while self.now < until:
            self.now += 1
            if self.pinning and not self.refused:
                self.done = min(self.done + self.rate, self.to_pin_bytes)
            if self.done == self.to_pin_bytes or self.refused:
                self.pinning = 0
            due, self.due = self.due, []
            for at, call in due:
                assert at <= self.now
                call()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def told(clock: Clock) -> Pinning:
    loop: Any = clock
    return Pinning(clock, loop, lambda: clock.now, clock.post)


def test_what_is_pinned_soon_is_one_record_and_no_line_for_people(
    clock: Clock, told: Pinning, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock.register(GIB // 2)
    told.begun()
    clock.run(60)
    (record,) = clock.posted
    assert (record.nbytes, record.of, record.took_s, record.refused) == (GIB // 2, GIB // 2, 1, "")
    assert not caplog.messages
    assert not clock.due, "nobody looks when nothing is pinned"


def test_what_takes_long_is_said_every_period_and_at_its_end(
    clock: Clock, told: Pinning, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock.register(34 * GIB + GIB // 2)
    told.begun()
    clock.run(200)
    assert [r.nbytes // GIB for r in clock.posted] == [10, 20, 30, 34]
    assert [r.took_s for r in clock.posted] == [10, 20, 30, 35]
    assert caplog.messages[0] == "10 GiB of 34.5 GiB of host copies are pinned so far, after 10 s"
    assert caplog.messages[-1] == "34.5 GiB of 34.5 GiB of host copies are pinned, after 35 s"
    assert not clock.due


def test_many_host_copies_are_a_few_records(clock: Clock, told: Pinning) -> None:
    for _ in range(200):
        clock.register(GIB // 4)
        told.begun()
        clock.run(1)
    clock.run(60)
    assert clock.posted[-1].nbytes == clock.posted[-1].of == 50 * GIB
    assert len(clock.posted) <= 260 / PERIOD_S
    times = [record.now for record in clock.posted]
    assert all(b - a >= PERIOD_S for a, b in pairwise(times))


def test_a_refusal_is_the_end_and_says_why(clock: Clock, told: Pinning) -> None:
    clock.register(100 * GIB)
    told.begun()
    clock.run(3)
    clock.refused = "the limit of 3 GiB is reached"
    clock.run(60)
    (record,) = clock.posted
    assert (record.nbytes, record.refused) == (3 * GIB, "the limit of 3 GiB is reached")
    assert not clock.due


def test_nothing_is_said_of_host_copies_that_are_gone(clock: Clock, told: Pinning) -> None:
    clock.register(GIB)
    told.begun()
    clock.to_pin_bytes = clock.done = clock.pinning = 0
    clock.run(60)
    assert not clock.posted
    assert not clock.due


def test_nothing_is_said_of_a_device_that_needs_no_pins(clock: Clock, told: Pinning) -> None:
    clock.needs_pins = False
    clock.register(GIB)
    told.begun()
    assert not clock.due


def test_nothing_is_said_once_it_is_closed(clock: Clock, told: Pinning) -> None:
    clock.register(GIB)
    told.begun()
    told.close()
    clock.run(60)
    assert not clock.posted
