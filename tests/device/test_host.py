"""Features of the host device alone: its errors, its throttle, and a clean end."""

import errno
import os
import re
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from swapd.device import DeviceError, HostDevice, host, open_device
from swapd.shared import vm
from swapd.shared.units import parse_size
from tests.processes import output_of

CHUNK = 2 << 20
PROGRAM = Path(__file__).parent / "programs" / "host_device.py"


def arenas() -> int:
    """The number of arenas mapped in this process; other tests may have left some."""
    return Path("/proc/self/maps").read_text().count("memfd:swapd-arena")


def test_a_budget_beyond_the_host_s_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(DeviceError, match="lower --budget") as refused:
        HostDevice(1 << 50, CHUNK)
    asked, free = map(parse_size, re.findall(r"[\d.]+ [MGT]iB", str(refused.value)))
    assert asked == 1 << 50
    assert 0 < free < asked


def test_the_budget_may_be_all_that_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 0 < host.available_bytes() < 1 << 50
    monkeypatch.setattr(host, "available_bytes", lambda: 3 * CHUNK)
    HostDevice(3 * CHUNK, CHUNK).close()
    with pytest.raises(DeviceError, match=r"8 MiB.* 6 MiB"):
        HostDevice(4 * CHUNK, CHUNK)


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(DeviceError, match=r"no device 'tpu:0'; use --device host"):
        open_device("tpu:0", CHUNK, CHUNK, None)


def test_the_arena_is_allocated_from_the_start() -> None:
    """A page first touched while a worker waits would cost that worker time."""
    with closing(HostDevice(4 * CHUNK, CHUNK)) as device, device.export(0, writable=False) as fd:
        assert os.fstat(fd.fileno()).st_blocks * 512 == 4 * CHUNK


def test_an_arena_that_cannot_be_allocated_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(address: int, nbytes: int, *, writable: bool) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(vm, "populate", full)
    before = sorted(os.listdir("/proc/self/fd")), arenas()
    with pytest.raises(DeviceError, match="4 MiB: Cannot allocate memory"):
        HostDevice(2 * CHUNK, CHUNK)
    assert (sorted(os.listdir("/proc/self/fd")), arenas()) == before


def test_close_unmaps_the_arena() -> None:
    before = arenas()
    device = HostDevice(2 * CHUNK, CHUNK)
    assert arenas() == before + 1
    device.close()
    assert arenas() == before


def test_no_worker_can_shut_the_arena_for_the_next() -> None:
    """A worker runs as the same user, so it can change the memfd's mode and seals."""
    output_of(PROGRAM, "shut_the_arena")


def test_a_read_only_export_can_never_be_mapped_writable() -> None:
    with closing(HostDevice(CHUNK, CHUNK)) as device, device.export(0, writable=False) as fd:
        number = fd.fileno()
        said = output_of(PROGRAM, "write_a_read_only_export", number, CHUNK, fds=[number])
    assert said.splitlines() == ["Permission denied", "-1 Permission denied"]


@pytest.mark.parametrize("verb", ["copy_in", "copy_out"])
def test_a_throttled_copy_is_slower(verb: str) -> None:
    memory = vm.map_anonymous(2 * CHUNK)
    vm.populate(memory, 2 * CHUNK, writable=True)

    def took(bandwidth: float | None) -> float:
        with closing(HostDevice(2 * CHUNK, CHUNK, bandwidth)) as device:
            started = time.monotonic()
            getattr(device, verb)(((0, 2),), memory, 2 * CHUNK)
            return time.monotonic() - started

    fast, slow = min(took(None) for _ in range(3)), took(16.0 * CHUNK)
    vm.free(memory, 2 * CHUNK)
    assert slow > 3 * fast


def test_a_throttled_copy_moves_the_very_bytes_too() -> None:
    nbytes = CHUNK + host.SLOW_PIECE_BYTES // 2 + 7
    memory = vm.map_anonymous(2 * CHUNK)
    vm.view(memory, nbytes)[:] = content = bytes(i * i % 251 for i in range(1000)) * (
        nbytes // 1000
    ) + bytes(nbytes % 1000)
    with closing(HostDevice(2 * CHUNK, CHUNK, 1e12)) as device:
        device.copy_in(((1, 1), (0, 1)), memory, nbytes)
        vm.view(memory, nbytes)[:] = bytes(nbytes)
        device.copy_out(((1, 1), (0, 1)), memory, nbytes)
    assert bytes(vm.view(memory, nbytes)) == content
    vm.free(memory, 2 * CHUNK)


def test_close_joins_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    before = set(threading.enumerate())
    device = HostDevice(24 * CHUNK, CHUNK)
    memory = vm.map_anonymous(24 * CHUNK)
    device.copy_in(((0, 24),), memory, 24 * CHUNK)
    assert set(threading.enumerate()) > before, "a copy this large is shared by threads"
    device.close()
    assert set(threading.enumerate()) == before
    vm.free(memory, 24 * CHUNK)


def test_memory_that_the_kernel_does_not_take_is_an_error_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(vm, "punch", full)
    with closing(HostDevice(CHUNK, CHUNK)) as device, pytest.raises(DeviceError, match="lent"):
        device.lend(((0, 1),))


def test_lent_memory_that_is_not_there_any_more_is_not_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(HostDevice(4 * CHUNK, CHUNK)) as device:
        device.lend(((0, 4),))
        monkeypatch.setattr(host, "available_bytes", lambda: 3 * CHUNK)
        with pytest.raises(DeviceError, match=r"8 MiB .* 6 MiB"):
            device.reclaim(((0, 4),))
        with device.export(0, writable=False) as fd:
            assert os.fstat(fd.fileno()).st_blocks == 0
        device.reclaim(((0, 3),))


def test_what_cannot_be_taken_back_whole_is_not_taken_back_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    populate = vm.populate

    def second_fails(address: int, nbytes: int, *, writable: bool) -> None:
        monkeypatch.setattr(vm, "populate", full)
        populate(address, nbytes, writable=writable)

    def full(address: int, nbytes: int, *, writable: bool) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with closing(HostDevice(4 * CHUNK, CHUNK)) as device:
        device.lend(((0, 1), (2, 1)))
        monkeypatch.setattr(vm, "populate", second_fails)
        with pytest.raises(DeviceError, match="back: Cannot allocate memory"):
            device.reclaim(((0, 1), (2, 1)))
        with device.export(0, writable=False) as fd:
            assert os.fstat(fd.fileno()).st_blocks * 512 == 2 * CHUNK


def test_a_kernel_that_cannot_be_asked_for_memory_is_an_error_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a machine without a free descriptor: then only this one query fails."""
    device = HostDevice(2 * CHUNK, CHUNK)
    try:
        with monkeypatch.context() as patch:

            def refuse(path: Path) -> str:
                raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

            patch.setattr(Path, "read_text", refuse)
            with pytest.raises(DeviceError, match="Too many open files in system"):
                device.use()
        assert device.use().total
    finally:
        device.close()
