"""Every order is answered by exactly one event, also when the device fails."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from swapd.core.actions import CopyIn, CopyOut
from swapd.core.events import AnyEvent, CopiedIn, CopiedOut, CopyFailed, CopyStopped
from swapd.daemon.mover import Mover
from swapd.device import Device, HostDevice
from swapd.shared import vm
from swapd.shared.protocol import Runs
from tests.faults import FailingDevice
from tests.posted import NOW, Posted

CHUNK = 2 << 20

MoverOf = Callable[[Device], Mover]


def into(generation: int, nbytes: int = CHUNK, runs: Runs = ((0, 1),)) -> CopyIn:
    return CopyIn(1, "a", generation, nbytes, runs)


def back(generation: int, nbytes: int = CHUNK, runs: Runs = ((0, 1),)) -> CopyOut:
    return CopyOut(1, "a", generation, nbytes, runs)


def start(mover: Mover, order: CopyIn | CopyOut, address: int) -> None:
    if isinstance(order, CopyIn):
        mover.copy_in(order, address, lambda nbytes: None)
    else:
        mover.copy_out(order, address, lambda: None)


@pytest.fixture
async def posted() -> Posted:
    return Posted()


@pytest.fixture
async def mover_of(posted: Posted) -> AsyncIterator[MoverOf]:
    movers = []

    def make(device: Device) -> Mover:
        movers.append(Mover(device, posted.inbox))
        return movers[-1]

    yield make
    for mover in movers:
        await mover.finish()


@pytest.fixture
def master() -> Iterator[int]:
    address = vm.map_anonymous(CHUNK)
    yield address
    vm.free(address, CHUNK)


class GatedDevice(HostDevice):
    """A copy in ends only when `gate` is set; `began` is set at its start."""

    def __init__(self) -> None:
        super().__init__(2 * CHUNK, CHUNK)
        self.began, self.gate = threading.Event(), threading.Event()
        self.ended: list[str] = []

    def copy_in(self, runs: Runs, source: int, nbytes: int, **told: Any) -> None:
        self.began.set()
        self.gate.wait()
        super().copy_in(runs, source, nbytes, **told)
        self.ended.append("copy")


@pytest.mark.parametrize("n", [1, 2, 3])
async def test_a_copy_that_fails_is_one_event_and_the_next_works(
    mover_of: MoverOf, posted: Posted, master: int, n: int
) -> None:
    with closing(FailingDevice(CHUNK, CHUNK, fail_on={"copy_in": n, "copy_out": n})) as device:
        mover = mover_of(device)
        for generation in (1, 2, 3):
            start(mover, into(generation), master)
        events = await posted.some(3)
        for generation in (11, 12, 13):
            start(mover, back(generation), master)
        events += await posted.some(3)
    expected: list[AnyEvent] = [CopiedIn(NOW, g) for g in (1, 2, 3)]
    expected += [CopiedOut(NOW, g) for g in (11, 12, 13)]
    expected[n - 1] = CopyFailed(NOW, n, "injected: copy_in")
    expected[n + 2] = CopyFailed(NOW, 10 + n, "injected: copy_out")
    assert events == expected
    assert posted.crashes.empty()


async def test_an_order_that_makes_no_sense_to_the_device_fails_alone(
    mover_of: MoverOf, posted: Posted, master: int
) -> None:
    with closing(HostDevice(CHUNK, CHUNK)) as device:
        mover = mover_of(device)
        start(mover, into(1, nbytes=CHUNK + 1), master)
        start(mover, into(2, nbytes=0, runs=()), 0)
        failed, copied = await posted.some(2)
    assert isinstance(failed, CopyFailed)
    assert "do not fit" in failed.why
    assert copied == CopiedIn(NOW, 2)


async def test_one_direction_does_not_wait_for_the_other(
    mover_of: MoverOf, posted: Posted, master: int
) -> None:
    with closing(GatedDevice()) as device:
        mover = mover_of(device)
        start(mover, into(1), master)
        device.began.wait()
        start(mover, back(2, runs=((1, 1),)), master)
        assert await posted.events.get() == CopiedOut(NOW, 2)
        device.gate.set()
        assert await posted.events.get() == CopiedIn(NOW, 1)


async def test_copies_never_run_on_the_loop(mover_of: MoverOf, posted: Posted, master: int) -> None:
    threads = set()

    class WatchedDevice(HostDevice):
        def copy_in(self, runs: Runs, source: int, nbytes: int, **told: Any) -> None:
            threads.add(threading.current_thread())

        def copy_out(self, runs: Runs, target: int, nbytes: int, **told: Any) -> None:
            threads.add(threading.current_thread())

    with closing(WatchedDevice(CHUNK, CHUNK)) as device:
        mover = mover_of(device)
        for generation in range(4):
            start(mover, into(generation), master)
            start(mover, back(generation), master)
        await posted.some(8)
    assert threading.current_thread() not in threads
    assert len(threads) == 2, "one for each direction"


# --- loads in the order of their ranks ----------------------------------------------------

DEMAND, GUESS, NOBODYS = 0, 1, 2


class HeldLoad:
    """A load of 8 chunks that is held where its first bytes have landed, in its thread."""

    def __init__(self, mover: Mover, generation: int, source: int) -> None:
        self.landed, self._go_on = threading.Event(), threading.Event()
        order = CopyIn(1, "held", generation, 8 * CHUNK, ((0, 8),), urgency=(GUESS, 0, generation))
        mover.copy_in(order, source, self._on_the_way)

    def _on_the_way(self, nbytes: int) -> None:
        self.landed.set()
        self._go_on.wait()

    def go_on(self) -> None:
        self._go_on.set()


@pytest.fixture
def masters() -> Iterator[int]:
    address = vm.map_anonymous(8 * CHUNK)
    yield address
    vm.free(address, 8 * CHUNK)


def ranked(generation: int, who: int, chunk: int = 8) -> CopyIn:
    return CopyIn(1, "a", generation, CHUNK, ((chunk, 1),), urgency=(who, 0, generation))


async def test_a_load_stands_still_for_a_more_urgent_one_and_goes_on(
    mover_of: MoverOf, posted: Posted, masters: int
) -> None:
    content = vm.view(masters, 8 * CHUNK)
    content[:] = bytes(range(256)) * (8 * CHUNK // 256)
    with closing(HostDevice(16 * CHUNK, CHUNK)) as device:
        mover = mover_of(device)
        held = HeldLoad(mover, 1, masters)
        await asyncio.to_thread(held.landed.wait)
        start(mover, ranked(2, GUESS, 9), masters)
        start(mover, ranked(3, DEMAND), masters)
        held.go_on()
        first, second, third = await posted.some(3)
        assert first == CopiedIn(NOW, 3)
        assert isinstance(second, CopiedIn)
        assert (second.generation, third) == (1, CopiedIn(NOW, 2)), "the first of equal rank"
        assert second.took_s > 0
        back_again = vm.map_anonymous(8 * CHUNK)
        device.copy_out(((0, 8),), back_again, 8 * CHUNK)
        assert vm.view(back_again, 8 * CHUNK) == content
        vm.free(back_again, 8 * CHUNK)


async def test_a_load_that_has_not_begun_is_run_by_its_latest_rank(
    mover_of: MoverOf, posted: Posted, masters: int
) -> None:
    with closing(HostDevice(16 * CHUNK, CHUNK)) as device:
        mover = mover_of(device)
        held = HeldLoad(mover, 1, masters)
        await asyncio.to_thread(held.landed.wait)
        for generation in (2, 3, 4):
            start(mover, ranked(generation, NOBODYS, 7 + generation), masters)
        mover.hasten(4, (DEMAND, 0, 9))
        mover.hasten(3, (GUESS, 0, 9))
        mover.hasten(99, (DEMAND, 0, 9))  # has ended long ago
        held.go_on()
        ended = [e.generation for e in await posted.some(4) if isinstance(e, CopiedIn)]
        assert ended == [4, 1, 3, 2]


@pytest.mark.parametrize("begun", [True, False])
async def test_a_stopped_load_ends_between_two_pieces_and_the_next_begins(
    mover_of: MoverOf, posted: Posted, masters: int, begun: bool
) -> None:
    with closing(HostDevice(16 * CHUNK, CHUNK)) as device:
        mover = mover_of(device)
        held = HeldLoad(mover, 1, masters)
        await asyncio.to_thread(held.landed.wait)
        start(mover, ranked(2, NOBODYS), masters)
        start(mover, ranked(3, NOBODYS, 9), masters)
        mover.stop(1 if begun else 2)
        held.go_on()
        stopped, *copied = await posted.some(3)
        assert stopped == CopyStopped(NOW, 1 if begun else 2)
        assert [e.generation for e in copied if isinstance(e, CopiedIn)] == (
            [2, 3] if begun else [1, 3]
        )
        mover.stop(3)  # it has ended
    assert posted.crashes.empty()


async def test_its_end_waits_for_the_copies_and_then_tells_nobody(
    posted: Posted, master: int
) -> None:
    with closing(GatedDevice()) as device:
        mover = Mover(device, posted.inbox)
        start(mover, into(1), master)
        device.began.wait()
        start(mover, into(2), master)
        finishing = asyncio.get_running_loop().create_task(mover.finish())
        await asyncio.sleep(0)
        device.gate.set()
        await finishing
        assert device.ended == ["copy"], "what has not begun never begins"
        for _ in range(3):
            await asyncio.sleep(0)  # the loop runs the callbacks that the copies have posted to it
    assert posted.events.empty()
    assert posted.crashes.empty()
