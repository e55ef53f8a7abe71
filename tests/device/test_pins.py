"""Pinned memory: in slices, within a limit; copies also work from unpinned memory."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from swapd.device import DeviceError, pins
from swapd.device.cuda import CudaDevice
from swapd.device.driver import Driver
from swapd.device.pins import HostRange, Pins
from swapd.shared import vm
from tests import fakecuda

CHUNK = 2 << 20
SLICE = 1 << 20
LENGTH = 7 * SLICE // 2


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "SLICE_BYTES", SLICE)


@pytest.fixture
def driver(fake: fakecuda.Fake) -> Iterator[Driver]:
    with closing(Driver(0)) as driver:
        yield driver
    fake.faults()


@pytest.fixture
def memory() -> Iterator[int]:
    address = vm.map_anonymous(LENGTH)
    yield address
    vm.free(address, LENGTH)


def parts(pinned: Pins, address: int, nbytes: int = LENGTH) -> list[HostRange]:
    return list(pinned.parts(address, nbytes))


def test_memory_is_pinned_in_slices_and_told_slice_by_slice(driver: Driver, memory: int) -> None:
    with closing(Pins(driver, None, read_only=True)) as pinned:
        assert parts(pinned, memory) == [HostRange(0, LENGTH, False)]
        pinned.pin(memory, LENGTH, writable=True)
        assert parts(pinned, memory) == [
            HostRange(0, SLICE, True),
            HostRange(SLICE, SLICE, True),
            HostRange(2 * SLICE, SLICE, True),
            HostRange(3 * SLICE, SLICE // 2, True),
        ]
        assert parts(pinned, memory + SLICE - 100, 150) == [
            HostRange(0, 100, True),
            HostRange(100, 50, True),
        ]
        assert repr(pinned) == "<Pins 3.5 MiB of 3.5 MiB>"
        pinned.unpin(memory)
        assert parts(pinned, memory) == [HostRange(0, LENGTH, False)]
        assert pinned.pinned_bytes == 0


def test_parts_around_what_is_pinned_are_told_too(driver: Driver, memory: int) -> None:
    page = vm.PAGE_BYTES
    with closing(Pins(driver, None, read_only=True)) as pinned:
        pinned.pin(memory + page, page, writable=True)
        pinned.pin(memory + 3 * page, 1, writable=True)
        assert parts(pinned, memory, 5 * page) == [
            HostRange(0, page, False),
            HostRange(page, page, True),
            HostRange(2 * page, page, False),
            HostRange(3 * page, page, True),
            HostRange(4 * page, page, False),
        ]
        assert parts(pinned, memory + page + 1, 10) == [HostRange(0, 10, True)]
        assert parts(pinned, memory, 0) == []
        assert parts(pinned, memory + 2 * page, page) == [HostRange(0, page, False)]


def test_no_more_than_the_limit_is_pinned_over_all_memory(driver: Driver, memory: int) -> None:
    page = vm.PAGE_BYTES
    with closing(Pins(driver, 3 * page + 1, read_only=True)) as pinned:
        pinned.pin(memory, page, writable=True)
        with pytest.raises(DeviceError, match=r"8 KiB of 20 KiB .* 12 KiB"):
            pinned.pin(memory + page, 5 * page, writable=True)
        assert parts(pinned, memory, 6 * page) == [
            HostRange(0, page, True),
            HostRange(page, 2 * page, True),
            HostRange(3 * page, 3 * page, False),
        ]
        (note,) = pinned.notes()
        assert note.startswith("12 KiB of 24 KiB of host copies are pinned")
        assert "raise --pin-limit" in note
        pinned.unpin(memory)
        with pytest.raises(DeviceError, match="only 12 KiB of 20 KiB"):
            pinned.pin(memory + page, 5 * page, writable=True)


def test_what_is_refused_half_way_stays_pinned_up_to_there_and_can_go_on(
    driver: Driver, memory: int, fake: fakecuda.Fake
) -> None:
    with closing(Pins(driver, None, read_only=True)) as pinned:
        fake.faults("cuMemHostRegister 2 after=2")
        refused = r"only 2 MiB of 3.5 MiB pinned: CUDA_ERROR_OUT_OF_MEMORY \(2\) in cuMemHostReg"
        with pytest.raises(DeviceError, match=refused):
            pinned.pin(memory, LENGTH, writable=True)
        assert [part.pinned for part in parts(pinned, memory)] == [True, True, False]
        (note,) = pinned.notes()
        assert "CUDA_ERROR_OUT_OF_MEMORY" in note
        fake.faults()
        pinned.pin(memory, LENGTH, writable=True)
        assert all(part.pinned for part in parts(pinned, memory))
        assert pinned.notes() == ()


def test_a_slice_waits_for_copies_and_how_far_it_is_is_told(
    driver: Driver, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "YIELD_S", 60)
    with (
        closing(Pins(driver, None, read_only=True)) as pinned,
        ThreadPoolExecutor(1) as thread,
    ):
        with pinned.while_copying():
            pinning = thread.submit(pinned.pin, memory, LENGTH, writable=True)
            while not pinned.notes():
                pass
            assert pinned.notes() == ("0 B of 3.5 MiB of host copies are pinned so far",)
            assert not pinned.pinned_bytes
        pinning.result(timeout=30)  # the end of the copy woke it
        assert pinned.pinned_bytes == LENGTH
        assert pinned.notes() == ()


def test_copies_that_never_end_do_not_hold_it_up(
    driver: Driver, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "YIELD_S", 0.02)
    with closing(Pins(driver, None, read_only=True)) as pinned, pinned.while_copying():
        begun = time.monotonic()
        pinned.pin(memory, LENGTH, writable=True)
        assert time.monotonic() - begun >= 4 * 0.02, "a slice did not wait for them"
        assert pinned.pinned_bytes == LENGTH


def test_close_unpins_everything(driver: Driver, memory: int) -> None:
    for _ in range(3):  # the driver refuses memory that is already pinned
        pinned = Pins(driver, None, read_only=True)
        pinned.pin(memory, LENGTH, writable=True)
        pinned.close()


def test_memory_that_begins_within_a_page_is_refused(driver: Driver, memory: int) -> None:
    with closing(Pins(driver, None, read_only=True)) as pinned:
        with pytest.raises(DeviceError, match="begins within a page"):
            pinned.pin(memory + 1, 10, writable=True)
        pinned.pin(memory, 0, writable=True)
        assert pinned.pinned_bytes == 0


def test_read_only_memory_is_refused_where_the_gpu_does_not_take_it(
    driver: Driver, memory: int
) -> None:
    with closing(Pins(driver, None, read_only=False)) as pinned:
        with pytest.raises(DeviceError, match="read-only"):
            pinned.pin(memory, SLICE, writable=False)
        pinned.pin(memory, SLICE, writable=True)


def test_a_gpu_that_only_claims_to_take_read_only_memory_is_asked_with_a_page_that_is_freed(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "attribute", lambda self, name: 1)
    assert not pins.takes_read_only(driver)
    assert "memfd:swapd-probe" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("pin", [[], [(0, 3)], [(1, 2)], [(0, 1), (2, 1)], [(0, 1), (1, 3)]])
def test_copies_are_the_same_bytes_whatever_is_pinned(
    fake: fakecuda.Fake, pin: list[tuple[int, int]]
) -> None:
    """The fake driver refuses a copy from memory that is only partly pinned, or in two slices."""
    page, nbytes = vm.PAGE_BYTES, 3 * CHUNK + 12345
    length = vm.round_up(nbytes)
    memory = vm.map_anonymous(length)
    content = random.Random(1).randbytes(nbytes)
    with closing(CudaDevice(0, 5 * CHUNK, CHUNK)) as device:
        for first, count in pin:
            device.pin(memory + first * (CHUNK + page), count * (SLICE + page), writable=True)
        vm.view(memory, nbytes)[:] = content
        device.copy_in(((4, 1), (0, 3)), memory, nbytes)
        vm.view(memory, nbytes)[:] = bytes(nbytes)
        device.copy_out(((4, 1), (0, 3)), memory, nbytes)
        assert bytes(vm.view(memory, nbytes)) == content
    vm.free(memory, length)


def test_a_copy_goes_on_while_its_memory_is_being_pinned(
    fake: fakecuda.Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory pinned in between is used from the next piece on."""
    monkeypatch.setattr(pins, "YIELD_S", 0.001)  # each slice waits for this copy
    nbytes = 8 * CHUNK
    memory = vm.map_anonymous(nbytes)
    content = random.Random(2).randbytes(nbytes)
    vm.view(memory, nbytes)[:] = content
    with closing(CudaDevice(0, nbytes, CHUNK)) as device:

        def landed(n: int) -> None:
            if n == CHUNK:
                device.pin(memory, nbytes, writable=True)

        device.copy_in(((0, 8),), memory, nbytes, landed=landed)
        vm.view(memory, nbytes)[:] = bytes(nbytes)
        device.copy_out(((0, 8),), memory, nbytes)
        assert bytes(vm.view(memory, nbytes)) == content
    vm.free(memory, nbytes)


def test_a_device_says_what_it_could_not_pin(fake: fakecuda.Fake) -> None:
    memory = vm.map_anonymous(4 * CHUNK)
    with closing(CudaDevice(0, CHUNK, CHUNK, pin_limit=CHUNK)) as device:
        with pytest.raises(DeviceError, match="limit of 2 MiB"):
            device.pin(memory, 4 * CHUNK, writable=True)
        assert any(
            "2 MiB of 8 MiB of host copies are pinned" in note for note in device.use().notes
        )
        device.unpin(memory)
        assert not any("pinned" in note for note in device.use().notes)
    vm.free(memory, 4 * CHUNK)
