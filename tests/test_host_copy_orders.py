"""Host copies as the core orders them: each order is answered, even if its session has ended; short
work waits for a step of other sessions' long work at most; a few lines report pinning.
"""

import asyncio
import errno
import fcntl
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from swapd.core.actions import MakeHostCopy
from swapd.core.events import AnyEvent, HostCopiesPinned, HostCopyFailed, HostCopyMade
from swapd.daemon.host_copies import Work
from swapd.daemon.host_copy_orders import PERIOD_S, HostCopyOrders, PinReport, TimeSlices
from swapd.device import HostDevice
from swapd.device.base import Pinned
from swapd.shared.board import SLOTS, Boards
from swapd.shared.fds import OwnedFd
from tests.posted import NOW, Posted
from tests.test_host_copies import Copies, refuse_with

NBYTES = 4096
CHUNK = 2 << 20
GIB = 1 << 30
PATIENCE_S = 60.0


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with closing(HostDevice(CHUNK, CHUNK)) as device:
        yield device


async def test_what_a_session_shares_that_has_ended_can_be_shared_on(device: HostDevice) -> None:
    """The core may order that before it hears of the end."""
    copies, posted = Copies(None, device), Posted()
    orders = HostCopyOrders(copies, device, {}, posted.inbox)
    copies.made(1, NBYTES, mutable=False)
    copies.sealed(1)
    for uid, original in ((2, 1), (3, 2)):
        orders.make(MakeHostCopy(7, uid, f"c{uid}", NBYTES, mutable=False, original=original))
        orders.drop(original)
    assert await posted.some(2) == [HostCopyMade(NOW, 2), HostCopyMade(NOW, 3)]
    orders._drops.shutdown()
    assert copies.address(3)
    assert posted.crashes.empty()
    copies.close()
    assert len(copies) == copies.total_bytes == 0


def handing_back(fd: OwnedFd) -> Any:
    """The sessions, of which the first hands this back."""
    return {1: SimpleNamespace(lifeline=SimpleNamespace(take_handed_back=lambda _: fd))}


def handed_back() -> OwnedFd:
    """A host copy of an earlier daemon, whose worker has it still."""
    fd = OwnedFd(os.memfd_create("test", os.MFD_ALLOW_SEALING))
    os.posix_fallocate(fd.fileno(), 0, NBYTES)
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    return fd


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO], ids=errno.errorcode.get)
async def test_a_handed_back_one_that_cannot_be_taken_over_is_refused_and_the_daemon_goes_on(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    copies, posted, old = Copies(None, device), Posted(), handed_back()
    orders = HostCopyOrders(copies, device, handing_back(old), posted.inbox)
    orders.make(MakeHostCopy(1, 1, "a", NBYTES, mutable=False))
    if number == errno.EPERM:  # the worker forbids further seals, after the daemon has looked
        fcntl.fcntl(old.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    else:
        monkeypatch.setattr(fcntl, "fcntl", refuse_with(number))
    (failed,) = await asyncio.wait_for(posted.some(1), PATIENCE_S)
    assert isinstance(failed, HostCopyFailed)
    assert (failed.uid, failed.code, failed.short) == (1, "internal", False)
    assert os.strerror(number) in failed.why
    assert posted.crashes.empty()
    assert len(copies) == copies.total_bytes == 0
    with pytest.raises(ValueError, match="closed"):
        old.fileno()


async def test_one_component_more_than_a_session_may_have_is_refused_and_no_more(
    device: HostDevice,
) -> None:
    copies, posted = Copies(None, device), Posted()
    lifeline = SimpleNamespace(take_handed_back=lambda _: None, unread=0)
    with closing(Boards()) as boards:
        for _ in range(SLOTS):
            boards.take()
        sessions: Any = {1: SimpleNamespace(boards=boards, lifeline=lifeline)}
        orders = HostCopyOrders(copies, device, sessions, posted.inbox)
        orders.make(MakeHostCopy(1, 1, "a", NBYTES, mutable=False))
        (failed,) = await asyncio.wait_for(posted.some(1), PATIENCE_S)
    assert isinstance(failed, HostCopyFailed)
    assert (failed.uid, failed.code) == (1, "limit")
    assert "connect once more" in failed.why
    assert posted.crashes.empty()
    copies.close()


# --- time slices -------------------------------------------------------------------------


@pytest.fixture
async def slices() -> AsyncIterator[TimeSlices]:
    made = TimeSlices(1, "test")
    yield made
    made.threads.shutdown()


def steps(log: list[str], name: str, count: int) -> Work[str]:
    for i in range(count):
        log.append(f"{name}{i}")
        yield
    return name


async def test_sessions_take_turns_and_the_work_of_each_is_done_in_order(
    slices: TimeSlices,
) -> None:
    log: list[str] = []
    submitted = [(1, "a", 3), (1, "b", 1), (2, "c", 2), (3, "d", 1)]
    done = await asyncio.gather(*(slices.do(s, steps(log, name, n)) for s, name, n in submitted))
    assert done == ["a", "b", "c", "d"]
    assert log == ["a0", "c0", "d0", "a1", "c1", "a2", "b0"]


async def test_one_session_is_never_served_by_two_threads_at_once() -> None:
    slices = TimeSlices(3, "test")
    inside, most = 0, 0
    lock = threading.Lock()

    def busy() -> Work[None]:
        nonlocal inside, most
        for _ in range(200):
            with lock:
                inside += 1
                most = max(most, inside)
            with lock:
                inside -= 1
            yield

    await asyncio.gather(*(slices.do(1, busy()) for _ in range(5)))
    slices.threads.shutdown()
    assert most == 1


async def test_what_fails_is_told_and_what_comes_after_it_is_done(slices: TimeSlices) -> None:
    def fails() -> Work[None]:
        yield
        raise ValueError("injected")

    failed, after = await asyncio.gather(
        slices.do(1, fails()), slices.do(1, steps([], "after", 2)), return_exceptions=True
    )
    assert repr(failed) == "ValueError('injected')"
    assert after == "after"


async def test_a_stop_waits_for_a_step_and_does_no_other(slices: TimeSlices) -> None:
    log: list[str] = []
    gate, begun, closed = threading.Event(), threading.Event(), threading.Event()

    def work() -> Work[None]:
        try:
            begun.set()
            assert gate.wait(PATIENCE_S)
            yield
        finally:
            closed.set()

    posted = Posted()

    async def do(session: int, work: Work[Any]) -> None:
        await slices.do(session, work)

    for session, one in ((1, work()), (1, steps(log, "behind", 1)), (2, steps(log, "other", 1))):
        posted.inbox.start(do(session, one))
    del one
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    posted.inbox.stop()
    asyncio.get_running_loop().call_later(0.01, gate.set)
    await asyncio.wrap_future(slices.threads.submit(int))  # behind the step
    assert await asyncio.to_thread(closed.wait, PATIENCE_S), "its file is not closed"
    assert not log
    assert posted.crashes.empty()


# --- the report of pinning ---------------------------------------------------------------


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

    @property
    def loop(self) -> "Clock":
        return self

    def clock(self) -> float:
        return self.now

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
def report(clock: Clock) -> PinReport:
    everything: Any = clock
    return PinReport(everything, everything, everything)


def test_what_is_pinned_soon_is_one_record_and_no_line_for_people(
    clock: Clock, report: PinReport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock.register(GIB // 2)
    report.begin()
    clock.run(60)
    (record,) = clock.posted
    assert (record.nbytes, record.of, record.took_s, record.refused) == (GIB // 2, GIB // 2, 1, "")
    assert not caplog.messages
    assert not clock.due, "nobody looks when nothing is pinned"


def test_what_takes_long_is_said_every_period_and_at_its_end(
    clock: Clock, report: PinReport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock.register(34 * GIB + GIB // 2)
    report.begin()
    clock.run(200)
    assert [r.nbytes // GIB for r in clock.posted] == [10, 20, 30, 34]
    assert [r.took_s for r in clock.posted] == [10, 20, 30, 35]
    assert caplog.messages[0] == "10 GiB of 34.5 GiB of host copies are pinned so far, after 10 s"
    assert caplog.messages[-1] == "34.5 GiB of 34.5 GiB of host copies are pinned, after 35 s"
    assert not clock.due


def test_many_host_copies_are_a_few_records(clock: Clock, report: PinReport) -> None:
    for _ in range(200):
        clock.register(GIB // 4)
        report.begin()
        clock.run(1)
    clock.run(60)
    assert clock.posted[-1].nbytes == clock.posted[-1].of == 50 * GIB
    assert len(clock.posted) <= 260 / PERIOD_S
    times = [record.now for record in clock.posted]
    assert all(b - a >= PERIOD_S for a, b in pairwise(times))


def test_a_refusal_is_the_end_and_says_why(clock: Clock, report: PinReport) -> None:
    clock.register(100 * GIB)
    report.begin()
    clock.run(3)
    clock.refused = "the limit of 3 GiB is reached"
    clock.run(60)
    (record,) = clock.posted
    assert (record.nbytes, record.refused) == (3 * GIB, "the limit of 3 GiB is reached")
    assert not clock.due


def test_nothing_is_said_of_host_copies_that_are_gone(clock: Clock, report: PinReport) -> None:
    clock.register(GIB)
    report.begin()
    clock.to_pin_bytes = clock.done = clock.pinning = 0
    clock.run(60)
    assert not clock.posted
    assert not clock.due


def test_nothing_is_said_of_a_device_that_needs_no_pins(clock: Clock, report: PinReport) -> None:
    clock.needs_pins = False
    clock.register(GIB)
    report.begin()
    assert not clock.due
