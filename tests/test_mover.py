"""Every order is answered by exactly one event, also when the device fails."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from swapd.core.actions import CopyIn, CopyOut
from swapd.core.events import AnyEvent, CopiedIn, CopiedOut, CopyFailed
from swapd.daemon.mover import Mover
from swapd.device import Device, DeviceError, HostDevice
from swapd.shared import vm
from swapd.shared.protocol import Runs
from tests.faults import FailingDevice

CHUNK = 2 << 20
NOW = 12.5

MoverOf = Callable[[Device], Mover]


def into(generation: int, nbytes: int = CHUNK, runs: Runs = ((0, 1),)) -> CopyIn:
    return CopyIn(1, "a", generation, nbytes, runs)


def back(generation: int, nbytes: int = CHUNK, runs: Runs = ((0, 1),)) -> CopyOut:
    return CopyOut(1, "a", generation, nbytes, runs)


class Told:
    """The reports of a mover: events in order, and errors that no device should raise."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []
        self.crashes: list[BaseException] = []
        self._came = asyncio.Event()

    def post(self, event: AnyEvent) -> None:
        self.events.append(event)
        self._came.set()

    def crashed(self, error: BaseException) -> None:
        self.crashes.append(error)
        self._came.set()

    async def wait_for(self, n: int) -> None:
        while len(self.events) + len(self.crashes) < n:
            self._came.clear()
            await self._came.wait()


def start(mover: Mover, order: CopyIn | CopyOut, address: int) -> None:
    if isinstance(order, CopyIn):
        mover.copy_in(order, address, lambda nbytes: None)
    else:
        mover.copy_out(order, address, lambda chunks: None)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
async def mover_of(told: Told) -> AsyncIterator[MoverOf]:
    movers = []

    def make(device: Device) -> Mover:
        loop = asyncio.get_running_loop()
        movers.append(Mover(device, loop, lambda: NOW, told.post, told.crashed))
        return movers[-1]

    yield make
    for mover in movers:
        mover.close()


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


async def test_the_bytes_go_in_and_come_back(mover_of: MoverOf, told: Told, master: int) -> None:
    with closing(HostDevice(2 * CHUNK, CHUNK)) as device:
        mover = mover_of(device)
        vm.view(master, 5)[:] = b"hello"
        start(mover, into(3), master)
        await told.wait_for(1)
        vm.view(master, 5)[:] = b"-----"
        start(mover, back(4), master)
        await told.wait_for(2)
    assert bytes(vm.view(master, 5)) == b"hello"
    assert told.events == [CopiedIn(NOW, 3), CopiedOut(NOW, 4)]


@pytest.mark.parametrize("n", [1, 2, 3])
async def test_a_copy_that_fails_is_one_event_and_the_next_works(
    mover_of: MoverOf, told: Told, master: int, n: int
) -> None:
    with closing(FailingDevice(CHUNK, CHUNK, fail_on={"copy_in": n, "copy_out": n})) as device:
        mover = mover_of(device)
        for generation in (1, 2, 3):
            start(mover, into(generation), master)
        await told.wait_for(3)
        for generation in (11, 12, 13):
            start(mover, back(generation), master)
        await told.wait_for(6)
    expected: list[AnyEvent] = [CopiedIn(NOW, g) for g in (1, 2, 3)]
    expected += [CopiedOut(NOW, g) for g in (11, 12, 13)]
    expected[n - 1] = CopyFailed(NOW, n, "injected: copy_in")
    expected[n + 2] = CopyFailed(NOW, 10 + n, "injected: copy_out")
    assert told.events == expected
    assert not told.crashes


async def test_an_order_that_makes_no_sense_to_the_device_fails_alone(
    mover_of: MoverOf, told: Told, master: int
) -> None:
    with closing(HostDevice(CHUNK, CHUNK)) as device:
        mover = mover_of(device)
        start(mover, into(1, nbytes=CHUNK + 1), master)
        start(mover, into(2, nbytes=0, runs=()), 0)
        await told.wait_for(2)
    failed, copied = told.events
    assert isinstance(failed, CopyFailed)
    assert "do not fit" in failed.why
    assert copied == CopiedIn(NOW, 2)


async def test_an_error_that_is_not_the_device_s_is_a_crash_and_no_event(
    mover_of: MoverOf, told: Told, master: int
) -> None:
    class BrokenDevice(HostDevice):
        def copy_in(self, runs: Runs, source: int, nbytes: int, **told: Any) -> None:
            raise ZeroDivisionError("a bug")

    with closing(BrokenDevice(CHUNK, CHUNK)) as device:
        start(mover_of(device), into(1), master)
        await told.wait_for(1)
    assert not told.events
    assert [str(crash) for crash in told.crashes] == ["a bug"]


async def test_one_direction_does_not_wait_for_the_other(
    mover_of: MoverOf, told: Told, master: int
) -> None:
    with closing(GatedDevice()) as device:
        mover = mover_of(device)
        start(mover, into(1), master)
        device.began.wait()
        start(mover, back(2, runs=((1, 1),)), master)
        await told.wait_for(1)
        assert told.events == [CopiedOut(NOW, 2)]
        device.gate.set()
        await told.wait_for(2)
    assert told.events[1] == CopiedIn(NOW, 1)


async def test_copies_never_run_on_the_loop(mover_of: MoverOf, told: Told, master: int) -> None:
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
        await told.wait_for(8)
    assert threading.current_thread() not in threads
    assert len(threads) == 2, "one for each direction"


async def test_close_waits_for_the_copies_and_then_tells_nobody(
    mover_of: MoverOf, told: Told, master: int
) -> None:
    with closing(GatedDevice()) as device:
        mover = mover_of(device)
        start(mover, into(1), master)
        start(mover, into(2), master)
        device.began.wait()

        def close() -> None:
            mover.close()
            device.ended.append("close")

        closing_ = threading.Thread(target=close)
        closing_.start()
        device.gate.set()
        await asyncio.to_thread(closing_.join)
        assert device.ended == ["copy", "copy", "close"]
        for _ in range(3):
            await asyncio.sleep(0)  # the loop runs the callbacks that the copies have posted to it
    assert not told.events
    assert not told.crashes


async def test_close_ends_both_threads(told: Told, master: int) -> None:
    before = set(threading.enumerate())
    with closing(HostDevice(CHUNK, CHUNK)) as device:
        mover = Mover(device, asyncio.get_running_loop(), lambda: NOW, told.post, told.crashed)
        start(mover, into(1), master)
        start(mover, back(2), master)
        mover.close()
    assert set(threading.enumerate()) == before


async def test_the_injected_fault_is_the_nth_call_of_the_verb_and_no_other(master: int) -> None:
    with closing(FailingDevice(CHUNK, CHUNK, fail_on={"copy_out": 2})) as device:
        runs = ((0, 1),)
        device.copy_in(runs, master, CHUNK)
        device.copy_out(runs, master, CHUNK)
        device.copy_in(runs, master, CHUNK)
        with pytest.raises(DeviceError, match="injected: copy_out"):
            device.copy_out(runs, master, CHUNK)
        device.copy_out(runs, master, CHUNK)


# --- a copy in that follows a copy out onto its chunks ------------------------------------


class Ledger:
    """Two host copies and an arena of four chunks: "old" fills it, and "new" replaces it."""

    def __init__(self, device: HostDevice) -> None:
        self.device = device
        self.nbytes = 4 * CHUNK
        self.saved: list[int] = []
        self.old, self.new = (vm.map_anonymous(self.nbytes) for _ in range(2))
        for i in range(4):
            vm.view(self.old + i * CHUNK, CHUNK)[:] = bytes([i + 1]) * CHUNK
            vm.view(self.new + i * CHUNK, CHUNK)[:] = bytes([i + 101]) * CHUNK
        device.copy_in(((0, 4),), self.old, self.nbytes)
        vm.view(self.old, self.nbytes)[:] = bytes(self.nbytes)

    def chunks(self, address: int) -> list[int]:
        """The first and only byte of each chunk at `address`."""
        found = []
        for i in range(4):
            (byte,) = set(bytes(vm.view(address + i * CHUNK, CHUNK)))
            found.append(byte)
        return found

    def on_device(self) -> list[int]:
        copy = vm.map_anonymous(self.nbytes)
        try:
            self.device.copy_out(((0, 4),), copy, self.nbytes)
            return self.chunks(copy)
        finally:
            vm.free(copy, self.nbytes)

    def close(self) -> None:
        for address in (self.old, self.new):
            vm.free(address, self.nbytes)


class StepwiseDevice(HostDevice):
    """Saves a chunk at each release of `steps`; fails at chunk `fail_at`, if given."""

    def __init__(self, fail_at: int | None = None, fail_restoring: bool = False) -> None:
        super().__init__(4 * CHUNK, CHUNK)
        self.steps = threading.Semaphore(0)
        self.wrote = threading.Semaphore(0)
        self.written: list[int] = []
        self._fail_at = fail_at
        self._fail_restoring = fail_restoring

    def copy_out(
        self, runs: Runs, target: int, nbytes: int, *, only: Any = None, landed: Any = None
    ) -> None:
        if landed is None:
            return super().copy_out(runs, target, nbytes)
        for i in range(nbytes // CHUNK):
            self.steps.acquire()
            if i == self._fail_at:
                raise DeviceError("injected: copy_out")
            super().copy_out(((i, 1),), target + i * CHUNK, CHUNK)
            landed((i + 1) * CHUNK)

    def copy_in(
        self,
        runs: Runs,
        source: int,
        nbytes: int,
        *,
        only: Any = None,
        may_write: Any = None,
        landed: Any = None,
    ) -> None:
        if may_write is None:
            if self._fail_restoring:
                raise DeviceError("injected: restore")
            return super().copy_in(runs, source, nbytes, landed=landed)

        def note(chunk: int) -> None:
            may_write(chunk)
            self.written.append(chunk)
            self.wrote.release()

        super().copy_in(runs, source, nbytes, may_write=note, landed=landed)


def swap(mover: Mover, ledger: Ledger, follow: int = 4) -> None:
    mover.copy_out(CopyOut(1, "old", 7, ledger.nbytes, ((0, 4),)), ledger.old, ledger.saved.append)
    order = CopyIn(2, "new", 8, follow * CHUNK, ((0, follow),), (7,))
    mover.copy_in(order, ledger.new, lambda nbytes: None)


async def test_no_chunk_is_overwritten_before_it_is_saved(mover_of: MoverOf, told: Told) -> None:
    with closing(StepwiseDevice()) as device, closing(Ledger(device)) as ledger:
        mover = mover_of(device)
        swap(mover, ledger)
        for _ in range(4):
            device.steps.release()
        await told.wait_for(2)
        assert told.events == [CopiedOut(NOW, 7), CopiedIn(NOW, 8)]
        assert ledger.chunks(ledger.old) == [1, 2, 3, 4]
        assert ledger.saved == [1, 2, 3, 4]
        assert ledger.on_device() == [101, 102, 103, 104]


async def test_what_follows_does_not_wait_for_the_whole(mover_of: MoverOf, told: Told) -> None:
    with closing(StepwiseDevice()) as device, closing(Ledger(device)) as ledger:
        mover = mover_of(device)
        mover.copy_out(
            CopyOut(1, "old", 7, ledger.nbytes, ((0, 4),)), ledger.old, ledger.saved.append
        )
        arrived: list[int] = []
        order = CopyIn(2, "new", 8, ledger.nbytes, ((0, 4),), (7,))
        mover.copy_in(order, ledger.new, arrived.append)
        device.steps.release()
        await asyncio.to_thread(device.wrote.acquire)
        assert device.written == [0]
        assert not told.events
        for _ in range(3):
            device.steps.release()
        await told.wait_for(2)
        assert device.written == [0, 1, 2, 3]
        assert arrived[-1] == ledger.nbytes


@pytest.mark.parametrize("fail_at", [0, 1, 3])
@pytest.mark.parametrize("follow", [1, 4])
async def test_a_save_that_fails_restores_what_was_overwritten(
    mover_of: MoverOf, told: Told, fail_at: int, follow: int
) -> None:
    with closing(StepwiseDevice(fail_at)) as device, closing(Ledger(device)) as ledger:
        swap(mover_of(device), ledger, follow)
        for _ in range(4):
            device.steps.release()
        await told.wait_for(2)
        first, second = told.events
        assert isinstance(first, CopyFailed)
        assert (first.generation, "still holds old" in first.why) == (8, True)
        assert second == CopyFailed(NOW, 7, "injected: copy_out")
        assert ledger.on_device() == [1, 2, 3, 4]


async def test_what_cannot_be_restored_is_said(mover_of: MoverOf, told: Told) -> None:
    device = StepwiseDevice(fail_at=2)
    with closing(device), closing(Ledger(device)) as ledger:
        device._fail_restoring = True
        swap(mover_of(device), ledger)
        device.steps.release()
        await asyncio.to_thread(device.wrote.acquire)  # otherwise there is nothing to restore
        for _ in range(3):
            device.steps.release()
        await told.wait_for(2)
        last = told.events[-1]
        assert isinstance(last, CopyFailed)
        assert (last.generation, last.damaged) == (7, True)
        assert "could not be restored" in last.why


async def test_closing_in_the_middle_of_a_chain_ends(mover_of: MoverOf, told: Told) -> None:
    with closing(StepwiseDevice()) as device, closing(Ledger(device)) as ledger:
        mover = mover_of(device)
        swap(mover, ledger)
        for _ in range(4):
            device.steps.release()
        await asyncio.to_thread(mover.close)
        assert not told.events
