"""Lent memory: every worker lets go first, and the daemon asks for it back until it returns."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from types import MappingProxyType
from typing import Any

import pytest

from swapd.core.actions import Lend, Reclaim
from swapd.core.chunks import count, without
from swapd.core.events import (
    CopyFailed,
    DeviceDown,
    DropAck,
    Dropping,
    Lent,
    Reclaimed,
)
from swapd.daemon import lending
from swapd.daemon.lending import Lender
from swapd.device import ChunksMissing, DeviceError, DeviceLost
from swapd.device.base import numbers, runs_of
from swapd.shared import protocol
from swapd.shared.protocol import Runs
from tests.posted import NOW, Posted

#: Files 2 and 3: on this device a chunk is a file.
ORDER = Lend(9, "workspace 9.1", 5, ((2, 2),))
BACK = Reclaim("workspace 9.1", 5, ((2, 2),))


class Device:
    """Lends and reclaims, or fails a set number of times."""

    chunks_per_file = 1

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lend_fails = 0
        self.reclaim_fails = 0
        self.chunk_bytes = 2 << 20
        #: The number of chunks that one call reclaims; None: all.
        self.back_at_once: int | None = None
        self.began, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def lend(self, runs: Runs) -> None:
        self.calls.append("lend")
        self.began.set()
        self.gate.wait()
        if self.lend_fails:
            self.lend_fails -= 1
            raise DeviceError("injected: lend")

    def reclaim(self, runs: Runs) -> None:
        self.calls.append("reclaim")
        if self.reclaim_fails:
            self.reclaim_fails -= 1
            raise DeviceError("injected: reclaim")
        if self.back_at_once is not None and count(runs) > self.back_at_once:
            back = runs_of(numbers(runs)[: self.back_at_once])
            raise ChunksMissing("injected: short", back, without(runs, back))


class Worker:
    """Has some files, and records its messages."""

    def __init__(self, *files: int) -> None:
        self.files = set(files)
        self.heard: list[protocol.FromDaemon] = []
        self.lifeline = self

    def send(self, message: protocol.FromDaemon) -> None:
        self.heard.append(message)

    def forget_files(self, numbers: Iterable[int]) -> tuple[int, ...]:
        had = tuple(sorted(self.files & set(numbers)))
        self.files -= set(numbers)
        return had


LenderOf = Callable[..., tuple[Lender, Posted]]


@pytest.fixture
async def lender_of(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LenderOf]:
    monkeypatch.setattr(lending, "RETRY_FIRST_S", 0.001)
    monkeypatch.setattr(lending, "RETRY_LAST_S", 0.002)
    made: list[tuple[Lender, Posted]] = []

    def make(device: Any, connections: Any = MappingProxyType({})) -> tuple[Lender, Posted]:
        posted = Posted()
        made.append((Lender(device, connections, posted.inbox), posted))
        return made[-1]

    yield make
    for lender, posted in made:
        posted.inbox.stop()
        lender._thread.shutdown()


async def _begun(lender: Lender) -> None:
    """Return when all tasks have given the device their orders, and these are carried out."""
    for _ in range(2):
        await asyncio.wrap_future(lender._thread.submit(int))


async def test_who_has_none_of_it_is_not_asked(lender_of: LenderOf) -> None:
    device, worker = Device(), Worker(0, 1)
    lender, told = lender_of(device, {1: worker})
    lender.lend(ORDER)
    assert await told.events.get() == Lent(NOW, 5)
    assert worker.heard == []


async def test_the_driver_gets_it_when_all_have_let_go(lender_of: LenderOf) -> None:
    device, one, two = Device(), Worker(1, 2), Worker(2, 3, 4)
    lender, told = lender_of(device, {1: one, 2: two})
    lender.lend(ORDER)
    (first,), (second,) = one.heard, two.heard
    assert isinstance(first, protocol.Drop)
    assert isinstance(second, protocol.Drop)
    assert (first.numbers, second.numbers) == ((2,), (2, 3))
    assert told.events.get_nowait() == Dropping(NOW, 5, (1, 2))
    lender.dropped(2, first.ticket)  # another session's ticket: a false message
    lender.dropped(1, first.ticket)
    lender.dropped(1, first.ticket)  # a second time
    await _begun(lender)
    assert device.calls == []
    assert told.events.get_nowait() == DropAck(NOW, 1, 5)
    assert told.events.empty()
    lender.dropped(2, second.ticket)
    assert told.events.get_nowait() == DropAck(NOW, 2, 5)
    assert await told.events.get() == Lent(NOW, 5)
    assert (one.files, two.files) == ({1}, {4})


async def test_of_tens_of_thousands_of_files_each_message_is_a_packet(lender_of: LenderOf) -> None:
    """As of a budget of 80 GiB in chunks of 2 MiB."""
    files = range(40_000)
    device, worker = Device(), Worker(*files)
    lender, told = lender_of(device, {1: worker})
    lender.lend(Lend(9, "workspace 9.1", 5, ((0, len(files)),)))
    assert told.events.get_nowait() == Dropping(NOW, 5, (1,))
    drops = [message for message in worker.heard if isinstance(message, protocol.Drop)]
    assert [number for drop in drops for number in drop.numbers] == list(files)
    for drop in drops:
        assert len(protocol.encode(drop)) <= protocol.LIFELINE_MAX_BYTES
        assert told.events.empty()
        lender.dropped(1, drop.ticket)
    assert told.events.get_nowait() == DropAck(NOW, 1, 5)
    assert await told.events.get() == Lent(NOW, 5)
    assert device.calls == ["lend"]


async def test_who_is_gone_is_not_waited_for(lender_of: LenderOf) -> None:
    lender, told = lender_of(Device(), {1: Worker(2), 2: Worker(3)})
    lender.lend(ORDER)
    lender.session_gone(1)
    lender.session_gone(2)
    assert told.events.get_nowait() == Dropping(NOW, 5, (1, 2))
    assert await told.events.get() == Lent(NOW, 5)


async def test_who_is_gone_while_others_are_asked_ends_nothing_early(lender_of: LenderOf) -> None:
    """A send to a worker that does not read ends its session, in the middle of the requests."""

    class Deaf(Worker):
        def send(self, message: protocol.FromDaemon) -> None:
            super().send(message)
            del workers[1]
            lender.session_gone(1)

    device, other = Device(), Worker(3)
    workers: Any = {1: Deaf(2), 2: other}
    lender, told = lender_of(device, workers)
    lender.lend(ORDER)
    (drop,) = other.heard
    assert isinstance(drop, protocol.Drop)
    await _begun(lender)
    assert device.calls == [], "the other has not let go"
    lender.dropped(2, drop.ticket)
    assert told.events.get_nowait() == Dropping(NOW, 5, (1, 2)), "before any answer to it"
    assert told.events.get_nowait() == DropAck(NOW, 2, 5)
    assert await told.events.get() == Lent(NOW, 5)
    assert device.calls == ["lend"]


async def test_what_cannot_be_lent_is_whole_again_before_it_is_said(lender_of: LenderOf) -> None:
    device = Device()
    device.lend_fails, device.reclaim_fails = 1, 2
    lender, told = lender_of(device)
    lender.lend(ORDER)
    assert await told.events.get() == CopyFailed(NOW, 5, "injected: lend")
    assert device.calls == ["lend", "reclaim", "reclaim", "reclaim"]


async def test_what_is_back_is_told_at_once_and_the_rest_is_asked_for(lender_of: LenderOf) -> None:
    device = Device()
    device.back_at_once = 1
    lender, told = lender_of(device)
    lender.reclaim(Reclaim("workspace 9.1", 5, ((2, 3),)))
    assert await told.events.get() == Reclaimed(NOW, 5, ((2, 1),))
    assert lender.notes() == (
        "workspace 9.1: 4 MiB are not back yet; swapd asks again: injected: short",
    )
    assert await told.events.get() == Reclaimed(NOW, 5, ((3, 1),))
    assert await told.events.get() == Reclaimed(NOW, 5), "what was left to come"
    assert lender.notes() == ()


async def test_memory_is_asked_back_until_it_is_there(
    lender_of: LenderOf, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device()
    device.reclaim_fails = 6
    lender, told = lender_of(device)
    lender.reclaim(BACK)
    assert await told.events.get() == Reclaimed(NOW, 5)
    assert device.calls == ["reclaim"] * 7
    assert [r.message for r in caplog.records].count(
        "workspace 9.1: 4 MiB are not back yet; swapd asks again: injected: reclaim"
    ) == 1


async def test_what_a_lost_device_was_lent_is_asked_for_no_more(lender_of: LenderOf) -> None:
    class Lost(Device):
        def lend(self, runs: Runs) -> None:
            raise DeviceLost("lost")

        def reclaim(self, runs: Runs) -> None:
            raise DeviceLost("lost")

    lender, told = lender_of(Lost())
    lender.reclaim(BACK)
    assert await told.events.get() == DeviceDown(NOW, "lost")
    assert await told.events.get() == Reclaimed(NOW, 5)
    lender.lend(ORDER)
    assert await told.events.get() == DeviceDown(NOW, "lost")
    assert await told.events.get() == CopyFailed(NOW, 5, "lost")
    assert lender.notes() == ()


async def test_closing_in_the_middle_tells_nobody(lender_of: LenderOf) -> None:
    device = Device()
    device.gate.clear()
    lender, told = lender_of(device)
    lender.lend(ORDER)
    assert await asyncio.to_thread(device.began.wait, 60)
    told.inbox.stop()
    device.gate.set()
    await asyncio.wrap_future(lender._thread.submit(int))  # after the order, which goes on
    assert told.events.empty()


async def test_a_bug_of_the_device_s_is_a_crash(lender_of: LenderOf) -> None:
    class Broken(Device):
        def lend(self, runs: Runs) -> None:
            raise ZeroDivisionError("a bug")

    lender, told = lender_of(Broken())
    lender.lend(ORDER)
    assert str(await told.crashes.get()) == "a bug"


async def test_memory_is_exchanged_when_all_have_let_go_and_asked_for_until_it_is_there(
    lender_of: LenderOf,
) -> None:
    device, worker = Device(), Worker(2, 3)
    device.reclaim_fails = 2
    lender, told = lender_of(device, {1: worker})
    done = asyncio.Event()
    lender.exchange(9, ((2, 2),), done.set)
    assert isinstance(await told.events.get(), Dropping)
    (drop,) = worker.heard
    assert isinstance(drop, protocol.Drop)
    await _begun(lender)
    assert device.calls == []
    lender.dropped(1, drop.ticket)
    await done.wait()
    assert device.calls == ["lend", "reclaim", "reclaim", "reclaim"]
    assert isinstance(await told.events.get(), DropAck)
    assert told.events.empty()
    assert lender.notes() == ()


async def test_memory_that_does_not_go_is_not_taken_for_other_memory(
    lender_of: LenderOf,
) -> None:
    device = Device()
    device.lend_fails = 2
    lender, told = lender_of(device)
    done = asyncio.Event()
    lender.exchange(9, ((2, 2),), done.set)
    await done.wait()
    assert device.calls == ["lend", "lend", "lend", "reclaim"]
    assert told.events.empty()
