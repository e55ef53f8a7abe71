"""The contract of `swapd.device.base.Device`, tested for every backend.

A backend joins in tests/device/backends.py and conftest.py.
"""

import os
import random
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache

import pytest

from swapd.device import Device, DeviceError
from swapd.device.driver import Driver
from swapd.shared import vm
from swapd.shared.protocol import Runs
from tests.device.backends import CHUNK, PROGRAM, Backend, HostBytes
from tests.processes import line_of, output_of, start_python, tell

CHUNKS = 8


@pytest.fixture
def device(backend: Backend) -> Iterator[Device]:
    device = backend.open(CHUNKS * CHUNK, CHUNK)
    yield device
    device.close()


@lru_cache(maxsize=16)
def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def copy_in(device: Device, runs: Runs, content: bytes) -> None:
    source = HostBytes(len(content), content)
    device.copy_in(runs, source.address, source.nbytes)
    assert bytes(source) == content


def copy_out(device: Device, runs: Runs, nbytes: int) -> bytes:
    target = HostBytes(nbytes)
    device.copy_out(runs, target.address, nbytes)
    return bytes(target)


def open_fds() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


# --- the arena ---------------------------------------------------------------------------


def test_the_arena_is_the_budget_in_whole_chunks(backend: Backend) -> None:
    device = backend.open(3 * CHUNK + CHUNK // 2, CHUNK)
    assert (device.chunks, device.chunk_bytes) == (3, CHUNK)
    device.close()


@pytest.mark.parametrize(
    ("budget", "chunk"), [(CHUNK, 0), (CHUNK, -CHUNK), (CHUNK, CHUNK + 4096), (CHUNK - 1, CHUNK)]
)
def test_a_size_that_makes_no_sense_is_refused(backend: Backend, budget: int, chunk: int) -> None:
    backend.open(CHUNK, CHUNK).close()  # files that a driver opens only once
    before = open_fds()
    with pytest.raises(DeviceError, match="bytes"):
        backend.open(budget, chunk)
    assert open_fds() == before


def test_open_and_close_leave_no_descriptor_and_no_mapping(backend: Backend) -> None:
    _open_use_and_close(backend)  # files that a driver opens only once, as late as possible
    before = open_fds()
    _open_use_and_close(backend)
    assert open_fds() == before


def _open_use_and_close(backend: Backend) -> None:
    device = backend.open(CHUNKS * CHUNK, CHUNK)
    copy_in(device, ((0, 1),), b"x")
    for writable in (False, True):
        device.export(0, writable=writable).close()
    device.close()


# --- copies ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "runs",
    [((0, 3),), ((5, 1), (2, 2)), ((7, 1), (0, 1), (3, 1)), ((1, 1), (2, 1), (3, 1))],
    ids=str,
)
@pytest.mark.parametrize(
    "nbytes", [1, 255, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 12345, 3 * CHUNK]
)
def test_the_very_bytes_come_back(device: Device, runs: Runs, nbytes: int) -> None:
    content = noise(nbytes)
    copy_in(device, runs, content)
    assert copy_out(device, runs, nbytes) == content


def test_bytes_fill_the_runs_in_their_order(device: Device) -> None:
    first, second, third = noise(CHUNK, 1), noise(CHUNK, 2), noise(CHUNK, 3)
    copy_in(device, ((5, 1), (2, 2)), first + second + third)
    assert copy_out(device, ((2, 1),), CHUNK) == second
    assert copy_out(device, ((3, 1),), CHUNK) == third
    assert copy_out(device, ((5, 1),), CHUNK) == first


def test_a_copy_touches_no_chunk_but_its_own(device: Device) -> None:
    everything: Runs = ((0, CHUNKS),)
    before = noise(CHUNKS * CHUNK)
    copy_in(device, everything, before)
    copy_in(device, ((6, 1), (1, 2)), content := noise(2 * CHUNK + 7, 9))
    after = copy_out(device, everything, CHUNKS * CHUNK)
    expected = bytearray(before)
    expected[6 * CHUNK : 7 * CHUNK] = content[:CHUNK]
    expected[1 * CHUNK : 3 * CHUNK] = content[CHUNK:].ljust(2 * CHUNK, b"\0")
    assert after == bytes(expected)


@pytest.mark.parametrize("nbytes", [1, 4095, CHUNK - 1, CHUNK, CHUNK + 100])
def test_nothing_is_left_of_the_last_component_beyond_the_bytes_of_the_next(
    device: Device, nbytes: int
) -> None:
    copy_in(device, ((0, CHUNKS),), noise(CHUNKS * CHUNK))
    for seed, length in enumerate((nbytes, nbytes // 2 + 1, nbytes)):
        runs: Runs = ((5, 1), (2, 1)) if length > CHUNK else ((2, 1),)
        whole = sum(n for _, n in runs) * CHUNK
        copy_in(device, runs, content := noise(length, seed))
        assert copy_out(device, runs, whole) == content.ljust(whole, b"\0")


def test_nothing_is_left_of_what_a_worker_wrote_beyond_its_component(
    backend: Backend, device: Device
) -> None:
    copy_in(device, ((2, 1),), b"small")
    in_another_process(backend, device, "fill", chunk=2, writable=True)
    copy_in(device, ((2, 1),), b"tiny")
    assert copy_out(device, ((2, 1),), CHUNK) == b"tiny".ljust(CHUNK, b"\0")


def test_a_load_zeroes_no_more_than_what_is_left_of_the_one_before(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small components in large chunks come and go at no extra cost."""
    zeroed: list[int] = []
    monkeypatch.setattr(vm, "zero", lambda at, nbytes: zeroed.append(nbytes))
    monkeypatch.setattr(Driver, "zero_later", lambda self, at, nbytes, on: zeroed.append(nbytes))
    for nbytes in (100, 100, 60, 60):
        copy_in(device, ((2, 1),), noise(nbytes))
    assert zeroed == [40]


def test_nothing_is_left_of_a_copy_that_failed(device: Device) -> None:
    def refuse(_: int) -> None:
        raise DeviceError("no")

    content = HostBytes(CHUNK, noise(CHUNK))
    with pytest.raises(DeviceError, match="no"):
        device.copy_in(((3, 1),), content.address, CHUNK, landed=refuse)
    copy_in(device, ((3, 1),), b"next")
    assert copy_out(device, ((3, 1),), CHUNK) == b"next".ljust(CHUNK, b"\0")


def test_memory_that_was_lent_comes_back_without_what_was_there(device: Device) -> None:
    copy_in(device, ((0, CHUNKS),), noise(CHUNKS * CHUNK))
    device.lend(((1, 2),))
    device.reclaim(((1, 2),))
    assert copy_out(device, ((1, 2),), 2 * CHUNK) == bytes(2 * CHUNK)


def test_no_bytes_are_a_copy_too(device: Device) -> None:
    copy_in(device, ((0, 1),), b"kept")
    device.copy_in((), 0, 0)
    device.copy_out((), 0, 0)
    device.copy_in(((0, 1),), 0, 0)
    assert copy_out(device, ((0, 1),), 4) == b"kept"


@pytest.mark.parametrize("runs", [(), ((0, 1),), ((0, 1), (4, 1))], ids=str)
def test_more_bytes_than_the_chunks_hold_are_refused_before_any_is_copied(
    device: Device, runs: Runs
) -> None:
    nbytes = sum(n for _, n in runs) * CHUNK + 1
    copy_in(device, ((0, CHUNKS),), before := noise(CHUNKS * CHUNK))
    with pytest.raises(DeviceError, match=f"{nbytes} bytes do not fit"):
        copy_in(device, runs, bytes(nbytes))
    with pytest.raises(DeviceError, match=f"{nbytes} bytes do not fit"):
        copy_out(device, runs, nbytes)
    assert copy_out(device, ((0, CHUNKS),), CHUNKS * CHUNK) == before


def test_copies_run_in_both_directions_at_once(device: Device) -> None:
    there: Runs = ((0, 1), (4, 2))
    here: Runs = ((6, 2), (1, 1))
    copy_in(device, here, out := noise(3 * CHUNK, 1))
    with ThreadPoolExecutor(2) as threads:
        for round_ in range(8):
            content = noise(3 * CHUNK - round_, 2 + round_)
            inward = threads.submit(copy_in, device, there, content)
            outward = threads.submit(copy_out, device, here, len(out))
            inward.result()
            assert outward.result() == out
            assert copy_out(device, there, len(content)) == content


# --- copies of parts ---------------------------------------------------------------------

#: The copied parts of a component: nothing, one byte, across chunks, many, all of it.
PARTS: dict[str, tuple[tuple[int, int], ...]] = {
    "nothing": (),
    "one byte": ((CHUNK + 17, 1),),
    "a chunk and a half": ((CHUNK // 2, CHUNK + CHUNK // 2),),
    "many": tuple((at, 1000) for at in range(0, 3 * CHUNK - 1000, 4096)),
    "the ends": ((0, 5), (3 * CHUNK - 11, 6)),
    "all": ((0, 3 * CHUNK - 5),),
}


def parts_of(content: bytes, only: tuple[tuple[int, int], ...], around: bytes) -> bytes:
    """`content` in these parts, and `around` elsewhere."""
    made = bytearray(around)
    for start, nbytes in only:
        made[start : start + nbytes] = content[start : start + nbytes]
    return bytes(made)


@pytest.mark.parametrize("only", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("runs", [((2, 3),), ((6, 1), (1, 2))], ids=str)
def test_only_the_parts_that_are_named_come_in_and_the_rest_is_zero(
    device: Device, runs: Runs, only: tuple[tuple[int, int], ...]
) -> None:
    copy_in(device, ((0, CHUNKS),), noise(CHUNKS * CHUNK, 1))
    nbytes = 3 * CHUNK - 5
    source = HostBytes(nbytes, content := noise(nbytes, 2))
    told: list[int] = []
    device.copy_in(runs, source.address, nbytes, only=only, landed=told.append)
    assert copy_out(device, runs, 3 * CHUNK) == parts_of(content, only, bytes(3 * CHUNK))
    assert told == sorted(set(told))
    assert told[-1] == nbytes


@pytest.mark.parametrize("only", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("runs", [((2, 3),), ((6, 1), (1, 2))], ids=str)
def test_only_the_parts_that_are_named_go_out_and_the_rest_stays_as_it_was(
    device: Device, runs: Runs, only: tuple[tuple[int, int], ...]
) -> None:
    nbytes = 3 * CHUNK - 5
    copy_in(device, runs, content := noise(nbytes, 2))
    target = HostBytes(nbytes, before := noise(nbytes, 3))
    device.copy_out(runs, target.address, nbytes, only=only)
    assert bytes(target) == parts_of(content, only, before)


def test_of_a_source_of_which_nothing_comes_in_no_byte_is_read(device: Device) -> None:
    copy_in(device, ((0, CHUNKS),), noise(CHUNKS * CHUNK, 1))
    device.copy_in(((1, 2),), 0, 2 * CHUNK, only=())
    assert copy_out(device, ((1, 2),), 2 * CHUNK) == bytes(2 * CHUNK)


# --- reports and queries of a copy -------------------------------------------------------


def test_landed_is_told_in_order_and_at_the_end(device: Device) -> None:
    source = HostBytes(CHUNKS * CHUNK - 5)
    told: list[int] = []
    device.copy_in(((0, CHUNKS),), source.address, source.nbytes, landed=told.append)
    assert told == sorted(set(told))
    assert told[-1] == source.nbytes


def test_a_copy_of_no_bytes_has_landed_too(device: Device) -> None:
    told: list[int] = []
    device.copy_in(((3, 1),), 0, 0, landed=told.append)
    assert told == [0]


def test_what_is_said_to_have_landed_has(device: Device) -> None:
    copy_in(device, ((0, CHUNKS),), bytes(CHUNKS * CHUNK))
    content = noise(CHUNKS * CHUNK)
    source = HostBytes(len(content), content)
    right: list[bool] = []

    def check(n: int) -> None:
        right.append(copy_out(device, ((0, CHUNKS),), n) == content[:n])

    device.copy_in(((0, CHUNKS),), source.address, source.nbytes, landed=check)
    assert all(right)


@pytest.mark.parametrize("only", [None, PARTS["a chunk and a half"]], ids=["all", "a part"])
def test_a_copy_that_stood_still_goes_on_where_it_was(
    device: Device, only: tuple[tuple[int, int], ...] | None
) -> None:
    nbytes = CHUNKS * CHUNK - 5
    source = HostBytes(nbytes, content := noise(nbytes))
    runs: Runs = ((3, CHUNKS - 3), (0, 3))
    copy_in(device, ((0, CHUNKS),), noise(CHUNKS * CHUNK, 2))
    landed = times = 0

    def stand_still(n: int) -> None:
        nonlocal landed
        assert n > landed, "told again"
        landed = n
        if n < nbytes:
            raise InterruptedError

    while landed < nbytes:
        times += 1
        with suppress(InterruptedError):
            device.copy_in(
                runs, source.address, nbytes, only=only, start=landed, landed=stand_still
            )
    assert times > 1
    whole = content if only is None else parts_of(content, only, bytes(nbytes))
    assert copy_out(device, runs, CHUNKS * CHUNK) == whole.ljust(CHUNKS * CHUNK, b"\0")


def test_an_error_of_whoever_is_told_ends_the_copy(device: Device) -> None:
    def landed(n: int) -> None:
        raise ZeroDivisionError(n)

    memory = HostBytes(CHUNKS * CHUNK)
    with pytest.raises(ZeroDivisionError):
        device.copy_in(((0, CHUNKS),), memory.address, memory.nbytes, landed=landed)
    copy_in(device, ((0, 1),), b"on")
    assert copy_out(device, ((0, 1),), 2) == b"on"


def test_after_an_error_of_whoever_is_told_it_is_told_no_more(device: Device) -> None:
    """Other threads may still finish their pieces; a copy that goes on begins where it was told."""
    memory = HostBytes(CHUNKS * CHUNK)
    for _ in range(50):
        told: list[int] = []

        def landed(n: int, told: list[int] = told) -> None:
            told.append(n)
            raise InterruptedError

        with pytest.raises(InterruptedError):
            device.copy_in(((0, CHUNKS),), memory.address, memory.nbytes, landed=landed)
        assert len(told) == 1


# --- pins --------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, vm.PAGE_BYTES, 3 * CHUNK + 12345])
def test_copies_from_and_to_pinned_memory_are_the_same_bytes(device: Device, nbytes: int) -> None:
    length = vm.round_up(nbytes)
    memory = vm.map_anonymous(length)
    vm.view(memory, nbytes)[:] = content = noise(nbytes)
    device.pin(memory, nbytes, writable=True)
    device.copy_in(((2, 4),), memory, nbytes)
    vm.view(memory, nbytes)[:] = bytes(nbytes)
    device.copy_out(((2, 4),), memory, nbytes)
    assert bytes(vm.view(memory, nbytes)) == content
    device.unpin(memory)
    vm.view(memory, nbytes)[:] = bytes(nbytes)
    device.copy_out(((2, 4),), memory, nbytes)
    assert bytes(vm.view(memory, nbytes)) == content
    vm.free(memory, length)


def test_memory_that_is_read_only_here_can_be_pinned_where_the_device_says_so(
    device: Device,
) -> None:
    fd = os.memfd_create("master")
    os.write(fd, content := noise(CHUNK))
    memory = vm.map_shared(fd, 0, CHUNK, writable=False)
    if device.read_only_pins:
        device.pin(memory, CHUNK, writable=False)
    else:
        with pytest.raises(DeviceError, match="read-only"):
            device.pin(memory, CHUNK, writable=False)
    device.copy_in(((1, 1),), memory, CHUNK)
    assert copy_out(device, ((1, 1),), CHUNK) == content
    device.unpin(memory)
    vm.free(memory, CHUNK)
    os.close(fd)


def test_unpinning_what_is_not_pinned_is_nothing(device: Device) -> None:
    device.unpin(vm.PAGE_BYTES)


# --- lend and reclaim --------------------------------------------------------------------


def test_lent_chunks_give_their_memory_back_and_take_it_again(
    backend: Backend, device: Device
) -> None:
    copy_in(device, ((0, CHUNKS),), before := noise(CHUNKS * CHUNK))
    held = backend.held(device)
    device.lend(((1, 2), (6, 1)))
    assert backend.comes_to_hold(device, held - 3 * CHUNK)
    kept: Runs = ((0, 1), (3, 3), (7, 1))
    assert copy_out(device, kept, 5 * CHUNK) == b"".join(
        before[first * CHUNK : (first + n) * CHUNK] for first, n in kept
    )
    device.reclaim(((6, 1),))
    assert backend.comes_to_hold(device, held - 2 * CHUNK)
    device.reclaim(((1, 2),))
    assert backend.comes_to_hold(device, held)
    copy_in(device, ((0, CHUNKS),), content := noise(CHUNKS * CHUNK, 2))
    assert copy_out(device, ((0, CHUNKS),), CHUNKS * CHUNK) == content


def test_chunks_that_were_lent_are_exported_anew(backend: Backend, device: Device) -> None:
    device.lend(((0, CHUNKS),))
    device.reclaim(((0, CHUNKS),))
    copy_in(device, ((4, 1),), content := noise(CHUNK))
    seen = in_another_process(backend, device, "checksum", chunk=4, writable=False)
    assert int(seen) == zlib.crc32(content)


def test_a_device_may_be_closed_while_chunks_are_lent(backend: Backend) -> None:
    backend.open(CHUNK, CHUNK).close()
    before = open_fds()
    device = backend.open(CHUNKS * CHUNK, CHUNK)
    device.lend(((0, 3),))
    device.close()
    assert open_fds() == before


def test_use_says_how_much_there_is_and_how_much_is_free(device: Device) -> None:
    use = device.use()
    assert 0 < use.free < use.total


# --- export ------------------------------------------------------------------------------


def in_another_process(
    backend: Backend, device: Device, case: str, *, chunk: int = 0, writable: bool
) -> str:
    """The output of this case of the program, which maps `chunk` from its own export."""
    with device.export(chunk // device.chunks_per_file, writable=writable) as fd:
        number = fd.fileno()
        arguments = backend.arguments(case, device, number, chunk, writable)
        return output_of(PROGRAM, *arguments, fds=[number], env=backend.environment).strip()


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("chunk", [0, 1, CHUNKS - 1])
def test_another_process_sees_each_chunk_at_its_place(
    backend: Backend, device: Device, chunk: int, writable: bool
) -> None:
    copy_in(device, ((0, CHUNKS),), content := noise(CHUNKS * CHUNK))
    seen = in_another_process(backend, device, "checksum", chunk=chunk, writable=writable)
    assert int(seen) == zlib.crc32(content[chunk * CHUNK : (chunk + 1) * CHUNK])


def test_what_another_process_writes_through_a_writable_export_is_copied_out(
    backend: Backend, device: Device
) -> None:
    copy_in(device, ((0, CHUNKS),), bytes(CHUNKS * CHUNK))
    in_another_process(backend, device, "hello", chunk=2, writable=True)
    assert copy_out(device, ((1, 2),), CHUNK + 5) == bytes(CHUNK) + b"hello"


def test_exports_are_not_inherited(device: Device) -> None:
    for writable in (False, True):
        with device.export(0, writable=writable) as fd:
            assert not os.get_inheritable(fd.fileno())


def test_a_mapping_outlives_the_device(backend: Backend) -> None:
    device = backend.open(CHUNKS * CHUNK, CHUNK)
    copy_in(device, ((3, 1),), content := noise(CHUNK))
    with device.export(3 // device.chunks_per_file, writable=False) as fd:
        number = fd.fileno()
        arguments = backend.arguments("keep", device, number, 3, False)
        child = start_python(PROGRAM, *arguments, fds=[number], env=backend.environment)
    with child:
        assert line_of(child) == "mapped\n"
        device.close()
        tell(child, "now")
        assert int(line_of(child)) == zlib.crc32(content)
    assert child.returncode == 0
