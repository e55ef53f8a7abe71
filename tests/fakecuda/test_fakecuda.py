"""The fake driver keeps the driver's contract: memory, copies and streams in one process."""

import array
import ctypes
import mmap
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

from tests import fakecuda
from tests.fakecuda import calls
from tests.fakecuda.calls import (
    MIB,
    NONE,
    READ,
    UNIT,
    WRITE,
    Failed,
    Gate,
    Host,
    call,
    code_of,
    create,
    export,
    mapped,
    memory,
    reserve,
    unmapped,
)
from tests.processes import start_python


@pytest.fixture
def fake() -> Iterator[fakecuda.Fake]:
    """The machine of this process, with a current context; afterwards nothing of it may be left."""
    fake = fakecuda.loaded()
    calls.start()
    assert fake.held_bytes() == 0
    yield fake
    assert fake.held_bytes() == 0


@pytest.fixture
def stream(fake: fakecuda.Fake) -> Iterator[Any]:
    made = calls.stream()
    yield made
    call("cuStreamSynchronize", made)
    call("cuStreamDestroy", made)


# ---- allocations


def test_memory_comes_in_multiples_of_the_granularity(fake: fakecuda.Fake) -> None:
    assert call("cuMemGetAllocationGranularity", calls.properties(), 0) == UNIT
    for nbytes in (0, MIB, UNIT + 4096):
        assert code_of("cuMemCreate", nbytes, calls.properties(), 0) == calls.INVALID_VALUE


def test_a_handle_is_released_once(fake: fakecuda.Fake) -> None:
    handle = create()
    call("cuMemRelease", handle)
    assert code_of("cuMemRelease", handle) == calls.INVALID_VALUE
    assert code_of("cuMemRelease", 12345) == calls.INVALID_VALUE


def test_a_released_handle_is_of_no_use_even_while_its_memory_is_mapped(
    fake: fakecuda.Fake,
) -> None:
    handle = create()
    address = mapped(handle)
    call("cuMemRelease", handle)
    other = reserve()
    assert code_of("cuMemMap", other, UNIT, 0, handle, 0) == calls.INVALID_VALUE
    assert code_of("cuMemRelease", handle) == calls.INVALID_VALUE
    unmapped(address)
    call("cuMemAddressFree", other, UNIT)


def test_memory_lives_until_its_last_handle_and_mapping(fake: fakecuda.Fake) -> None:
    handle = create()
    one, two = mapped(handle), mapped(handle)
    call("cuMemRelease", handle)
    unmapped(one)
    assert fake.held_bytes() == UNIT
    unmapped(two)
    assert fake.held_bytes() == 0


def test_a_descriptor_under_way_in_a_socket_keeps_the_memory(fake: fakecuda.Fake) -> None:
    handle = create()
    fd = export(handle)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
        here.sendmsg([b"x"], [rights])
        os.close(fd)
        call("cuMemRelease", handle)
        assert fake.held_bytes() == UNIT
        _, received, _, _ = socket.recv_fds(there, 1, 1)
        imported = calls.import_(received[0])
        os.close(received[0])
    assert fake.held_bytes() == UNIT
    call("cuMemRelease", imported)
    assert fake.held_bytes() == 0


def test_every_import_is_released_on_its_own(fake: fakecuda.Fake) -> None:
    handle = create()
    fd = export(handle)
    imports = [calls.import_(fd), calls.import_(fd)]
    os.close(fd)
    call("cuMemRelease", handle)
    call("cuMemRelease", imports[0])
    assert fake.held_bytes() == UNIT
    call("cuMemRelease", imports[1])
    assert fake.held_bytes() == 0


def test_only_memory_that_was_made_for_it_is_exported(fake: fakecuda.Fake) -> None:
    handle = create(types=calls.NO_TYPE)
    assert code_of("cuMemExportToShareableHandle", handle, calls.FD, 0) == calls.INVALID_VALUE
    call("cuMemRelease", handle)


def test_other_descriptors_are_not_imported(fake: fakecuda.Fake) -> None:
    with open(os.devnull, "rb") as null:
        code = code_of("cuMemImportFromShareableHandle", null.fileno(), calls.FD)
    assert code == calls.INVALID_VALUE


# ---- mappings


def test_an_allocation_is_mapped_whole(fake: fakecuda.Fake) -> None:
    handle = create(2 * UNIT)
    address = reserve(4 * UNIT)
    refused = [
        (address, UNIT, 0),  # a part of it
        (address, UNIT, UNIT),  # from the middle
        (address, 3 * UNIT, 0),  # more than its size
        (address + MIB, 2 * UNIT, 0),  # off the granularity
        (address + 3 * UNIT, 2 * UNIT, 0),  # beyond the reservation
        (address + (1 << 40), 2 * UNIT, 0),  # not reserved at all
    ]
    for place, nbytes, offset in refused:
        assert code_of("cuMemMap", place, nbytes, offset, handle, 0) == calls.INVALID_VALUE
    call("cuMemRelease", handle)
    call("cuMemAddressFree", address, 4 * UNIT)


def test_nothing_is_mapped_over_a_mapping(fake: fakecuda.Fake) -> None:
    one, two = create(2 * UNIT), create()
    address = reserve(3 * UNIT)
    call("cuMemMap", address + UNIT, 2 * UNIT, 0, one, 0)
    assert code_of("cuMemMap", address, 2 * UNIT, 0, one, 0) == calls.INVALID_VALUE
    assert code_of("cuMemMap", address + 2 * UNIT, UNIT, 0, two, 0) == calls.INVALID_VALUE
    call("cuMemMap", address, UNIT, 0, two, 0)
    call("cuMemUnmap", address, 3 * UNIT)
    call("cuMemAddressFree", address, 3 * UNIT)
    call("cuMemRelease", one)
    call("cuMemRelease", two)


def test_only_whole_mappings_are_unmapped(fake: fakecuda.Fake) -> None:
    handle = create(2 * UNIT)
    address = reserve(4 * UNIT)
    call("cuMemMap", address, 2 * UNIT, 0, handle, 0)
    call("cuMemRelease", handle)
    for place, nbytes in ((address, UNIT), (address + UNIT, UNIT), (address, 3 * UNIT)):
        assert code_of("cuMemUnmap", place, nbytes) == calls.INVALID_VALUE
    assert fake.held_bytes() == 2 * UNIT
    call("cuMemUnmap", address, 2 * UNIT)
    assert code_of("cuMemUnmap", address, 2 * UNIT) == calls.INVALID_VALUE
    call("cuMemAddressFree", address, 4 * UNIT)


def test_addresses_are_freed_as_they_were_reserved_and_not_while_mapped(
    fake: fakecuda.Fake,
) -> None:
    address = reserve(2 * UNIT)
    handle = create()
    call("cuMemMap", address + UNIT, UNIT, 0, handle, 0)
    assert code_of("cuMemAddressFree", address, 2 * UNIT) == calls.INVALID_VALUE
    call("cuMemUnmap", address + UNIT, UNIT)
    call("cuMemRelease", handle)
    for place, nbytes in ((address, UNIT), (address + UNIT, UNIT)):
        assert code_of("cuMemAddressFree", place, nbytes) == calls.INVALID_VALUE
    call("cuMemAddressFree", address, 2 * UNIT)
    assert code_of("cuMemAddressFree", address, 2 * UNIT) == calls.INVALID_VALUE


def test_addresses_are_reserved_where_they_are_asked_for_if_that_is_free(
    fake: fakecuda.Fake,
) -> None:
    address = reserve(UNIT)
    call("cuMemAddressFree", address, UNIT)
    assert int(call("cuMemAddressReserve", UNIT, 0, address, 0)) == address
    other = int(call("cuMemAddressReserve", UNIT, 0, address, 0))
    assert other != address
    call("cuMemAddressFree", address, UNIT)
    call("cuMemAddressFree", other, UNIT)
    aligned = int(call("cuMemAddressReserve", UNIT, 64 * MIB, 0, 0))
    assert aligned % (64 * MIB) == 0
    call("cuMemAddressFree", aligned, UNIT)
    assert code_of("cuMemAddressReserve", UNIT, 3 * MIB, 0, 0) == calls.INVALID_VALUE
    assert code_of("cuMemAddressReserve", MIB, 0, 0, 0) == calls.INVALID_VALUE


# ---- access


def test_access_is_set_on_whole_mappings_or_on_nothing(fake: fakecuda.Fake) -> None:
    handle = create(2 * UNIT)
    address = reserve(4 * UNIT)
    call("cuMemMap", address, 2 * UNIT, 0, handle, 0)
    assert calls.access_of(address) == 0, "a new mapping has no access"
    for place, nbytes in ((address, 3 * UNIT), (address, UNIT), (address + UNIT, UNIT)):
        with pytest.raises(Failed, match="INVALID_VALUE"):
            calls.access(place, nbytes, WRITE)
        assert calls.access_of(address) == 0, "nothing is applied by a call that fails"
    calls.access(address, 2 * UNIT, READ)
    assert calls.access_of(address + UNIT) == int(READ)
    calls.access(address, 2 * UNIT, NONE)
    assert calls.access_of(address) == 0
    call("cuMemUnmap", address, 2 * UNIT)
    call("cuMemAddressFree", address, 4 * UNIT)
    call("cuMemRelease", handle)


def test_mapping_again_brings_no_access_back(fake: fakecuda.Fake) -> None:
    handle = create()
    address = mapped(handle)
    call("cuMemUnmap", address, UNIT)
    call("cuMemMap", address, UNIT, 0, handle, 0)
    assert calls.access_of(address) == 0
    unmapped(address)
    call("cuMemRelease", handle)


def test_the_processor_has_the_access_that_the_device_has(fake: fakecuda.Fake) -> None:
    def protection(address: int) -> str:
        for line in Path("/proc/self/maps").read_text().splitlines():
            bounds, flags = line.split()[:2]
            first, last = (int(part, 16) for part in bounds.split("-"))
            if first <= address < last:
                return flags[:2]
        return "none"

    address = memory(flags=READ)
    assert protection(address) == "r-"
    calls.access(address, UNIT, WRITE)
    assert protection(address) == "rw"
    calls.access(address, UNIT, NONE)
    assert protection(address) == "--"
    unmapped(address)


# ---- copies


def test_registered_memory_is_read_when_the_stream_gets_there(
    fake: fakecuda.Fake, stream: Any
) -> None:
    source = Host(4096).pin()
    address = memory()
    gate = Gate(stream)
    source[:3] = b"old"
    call("cuMemcpyHtoDAsync", address, source.address, 3, stream)
    source[:3] = b"new"
    gate.open()
    call("cuStreamSynchronize", stream)
    assert ctypes.string_at(address, 3) == b"new"
    unmapped(address)
    source.unpin()
    source.close()
    gate.close()


def test_other_memory_has_been_read_when_the_call_returns(fake: fakecuda.Fake, stream: Any) -> None:
    source = Host(4096)
    address = memory()
    gate = Gate(stream)
    source[:3] = b"old"
    call("cuMemcpyHtoDAsync", address, source.address, 3, stream)
    source[:3] = b"new"
    gate.open()
    call("cuStreamSynchronize", stream)
    assert ctypes.string_at(address, 3) == b"old"
    unmapped(address)
    source.close()
    gate.close()


def test_a_large_copy_from_other_memory_is_complete_when_the_call_returns(
    fake: fakecuda.Fake, stream: Any
) -> None:
    source = Host(2 * UNIT)
    source[2 * UNIT - 4 :] = b"last"
    address = memory(2 * UNIT)
    call("cuMemcpyHtoDAsync", address, source.address, 2 * UNIT, stream)
    assert ctypes.string_at(address + 2 * UNIT - 4, 4) == b"last"
    unmapped(address, 2 * UNIT)
    source.close()


def test_a_copy_to_other_memory_is_complete_when_the_call_returns(
    fake: fakecuda.Fake, stream: Any
) -> None:
    target = Host(4096)
    address = memory()
    call("cuMemsetD8Async", address, 0x61, 4096, stream)
    call("cuMemcpyDtoHAsync", target.address, address, 4, stream)
    assert target[:4] == b"aaaa"
    unmapped(address)
    target.close()


def test_a_copy_stays_in_one_registration(fake: fakecuda.Fake, stream: Any) -> None:
    host = Host(2 * mmap.PAGESIZE)
    call("cuMemHostRegister", host.address, mmap.PAGESIZE, 0)
    address = memory()
    copy = (address, host.address, 2 * mmap.PAGESIZE, stream)
    assert code_of("cuMemcpyHtoDAsync", *copy) == calls.INVALID_VALUE
    call("cuMemHostRegister", host.address + mmap.PAGESIZE, mmap.PAGESIZE, 0)
    assert code_of("cuMemcpyHtoDAsync", *copy) == calls.INVALID_VALUE  # across the seam of two
    host.unpin()
    call("cuMemHostUnregister", host.address + mmap.PAGESIZE)
    unmapped(address)
    host.close()


def test_host_addresses_are_not_taken_for_the_devices(fake: fakecuda.Fake, stream: Any) -> None:
    host = Host(4096)
    assert code_of("cuMemcpyHtoDAsync", host.address, host.address, 8, stream) == 1
    assert code_of("cuMemcpyDtoH", host.address, host.address, 8) == calls.INVALID_VALUE
    assert code_of("cuMemsetD8Async", host.address, 0, 8, stream) == calls.INVALID_VALUE
    host.close()


def test_an_applications_own_memory_counts(fake: fakecuda.Fake) -> None:
    address = int(call("cuMemAlloc", 3 * MIB))
    assert fake.held_bytes() == 2 * UNIT
    call("cuMemcpyHtoD", address, b"own", 3)
    assert code_of("cuMemUnmap", address, 2 * UNIT) == calls.INVALID_VALUE
    assert code_of("cuMemRetainAllocationHandle", address) == calls.INVALID_VALUE
    call("cuMemFree", address)
    assert code_of("cuMemFree", address) == calls.INVALID_VALUE


# ---- registered host memory


def test_a_page_is_registered_once(fake: fakecuda.Fake) -> None:
    host = Host(4 * mmap.PAGESIZE)
    middle = host.address + mmap.PAGESIZE
    call("cuMemHostRegister", middle + 100, 200, 0)
    for start, nbytes in ((middle, 50), (middle + 400, 50), (host.address, 4 * mmap.PAGESIZE)):
        assert code_of("cuMemHostRegister", start, nbytes, 0) == calls.ALREADY_REGISTERED
    assert code_of("cuMemHostUnregister", middle) == calls.NOT_REGISTERED
    call("cuMemHostUnregister", middle + 100)
    assert code_of("cuMemHostUnregister", middle + 100) == calls.NOT_REGISTERED
    host.close()


def test_memory_that_is_not_there_cannot_be_registered(fake: fakecuda.Fake) -> None:
    host = Host(mmap.PAGESIZE)
    address = host.address
    assert code_of("cuMemHostRegister", address, 1 << 40, 0) == calls.INVALID_VALUE
    host.close()
    assert code_of("cuMemHostRegister", 0, mmap.PAGESIZE, 0) == calls.INVALID_VALUE
    assert code_of("cuMemHostRegister", 1 << 46, mmap.PAGESIZE, 0) == calls.INVALID_VALUE


def test_registered_memory_has_the_same_address_on_the_device(fake: fakecuda.Fake) -> None:
    host = Host(mmap.PAGESIZE)
    assert code_of("cuMemHostGetDevicePointer", host.address, 0) == calls.INVALID_VALUE
    host.pin(2)
    assert int(call("cuMemHostGetDevicePointer", host.address, 0)) == host.address
    host.unpin()
    host.close()


# ---- streams and events


def test_a_stream_runs_in_order_and_others_run_beside_it(fake: fakecuda.Fake, stream: Any) -> None:
    other = calls.stream()
    address = memory()
    gate = Gate(stream)
    call("cuMemsetD8Async", address, 1, 4096, stream)
    call("cuMemsetD8Async", address, 2, 4096, stream)
    assert code_of("cuStreamQuery", stream) == calls.NOT_READY
    call("cuMemsetD8Async", address, 9, 4096, other)
    call("cuStreamSynchronize", other)
    assert code_of("cuStreamQuery", other) == 0
    assert ctypes.string_at(address, 1) == b"\x09"
    gate.open()
    call("cuStreamSynchronize", stream)
    assert ctypes.string_at(address, 1) == b"\x02"
    call("cuStreamDestroy", other)
    unmapped(address)
    gate.close()


def test_an_event_is_done_when_the_stream_has_got_there(fake: fakecuda.Fake, stream: Any) -> None:
    event = calls.event()
    assert code_of("cuEventQuery", event) == 0, "never recorded: nothing to wait for"
    gate = Gate(stream)
    call("cuEventRecord", event, stream)
    assert code_of("cuEventQuery", event) == calls.NOT_READY
    gate.open()
    call("cuEventSynchronize", event)
    assert code_of("cuEventQuery", event) == 0
    second = Gate(stream)
    call("cuEventRecord", event, stream)
    assert code_of("cuEventQuery", event) == calls.NOT_READY, "recorded anew"
    second.open()
    call("cuStreamSynchronize", stream)
    call("cuEventDestroy", event)
    assert code_of("cuEventQuery", event) == calls.INVALID_HANDLE
    gate.close()
    second.close()


def test_a_destroyed_stream_still_does_its_work(fake: fakecuda.Fake) -> None:
    stream, event = calls.stream(), calls.event()
    address = memory()
    gate = Gate(stream)
    call("cuMemsetD8Async", address, 5, 16, stream)
    call("cuEventRecord", event, stream)
    call("cuStreamDestroy", stream)
    assert code_of("cuEventQuery", event) == calls.NOT_READY
    gate.open()
    call("cuEventSynchronize", event)
    assert ctypes.string_at(address, 1) == b"\x05"
    call("cuEventDestroy", event)
    unmapped(address)
    gate.close()


def test_to_name_a_destroyed_stream_ends_the_process(fake: fakecuda.Fake) -> None:
    """A driver may do that, too, where it is undefined."""
    program = """
from tests.fakecuda import calls
calls.start()
one, two = calls.stream(), calls.stream()
assert calls.call("cuStreamGetId", one) != calls.call("cuStreamGetId", two)
calls.call("cuStreamDestroy", one)
calls.code_of("cuStreamQuery", one)
"""
    with start_python(program, env=fake.environment()) as process:
        assert process.wait() == -signal.SIGABRT


@pytest.mark.parametrize("where", ["device", "host"])
def test_flags_are_written_and_waited_for(fake: fakecuda.Fake, stream: Any, where: str) -> None:
    other = calls.stream()
    host = Host(mmap.PAGESIZE).pin()
    address = memory() if where == "device" else host.address
    for value, how in ((7, 0), (5, 0), (7, 1), (4, 2), (1, 3)):  # >=, >=, ==, and, nor
        call("cuStreamWaitValue64", stream, address, value, how)
    assert code_of("cuStreamQuery", stream) == calls.NOT_READY
    call("cuStreamWriteValue64", other, address, 7, 0)
    call("cuStreamSynchronize", stream)
    assert ctypes.string_at(address, 8) == (7).to_bytes(8, "little")
    call("cuStreamDestroy", other)
    if where == "device":
        unmapped(address)
    host.unpin()
    host.close()


def test_flags_lie_aligned_in_memory_that_the_device_can_see(
    fake: fakecuda.Fake, stream: Any
) -> None:
    host = Host(mmap.PAGESIZE)
    address = memory()
    refused = [host.address, address + 4, address + UNIT, 0]
    for place in refused:
        assert code_of("cuStreamWaitValue64", stream, place, 1, 0) == calls.INVALID_VALUE
        assert code_of("cuStreamWriteValue64", stream, place, 1, 0) == calls.INVALID_VALUE
    unmapped(address)
    host.close()


# ---- devices, contexts, the loader


def test_a_thread_without_a_context_can_manage_memory_but_not_use_it(fake: fakecuda.Fake) -> None:
    host = Host(mmap.PAGESIZE)
    stream, event = calls.stream(), calls.event()
    refused: list[tuple[Any, ...]] = [
        ("cuMemGetInfo",),
        ("cuStreamCreate", 1),
        ("cuStreamQuery", stream),
        ("cuEventCreate", 0),
        ("cuEventRecord", event, stream),
        ("cuMemHostRegister", host.address, mmap.PAGESIZE, 0),
        ("cuMemHostUnregister", host.address),
        ("cuMemsetD8Async", 0, 0, 1, stream),
    ]

    def without() -> list[int]:
        unmapped(memory())
        return [code_of(*each) for each in refused]

    assert calls.in_thread(without) == [calls.INVALID_CONTEXT] * len(refused)
    call("cuStreamDestroy", stream)
    call("cuEventDestroy", event)
    host.close()


def test_a_context_that_is_released_takes_its_streams_along(fake: fakecuda.Fake) -> None:
    def on_the_other_card() -> list[int]:
        calls.use(1)
        stream, event = calls.stream(), calls.event()
        gate = Gate(stream)
        call("cuEventRecord", event, stream)
        call("cuDevicePrimaryCtxRelease", 1)
        codes = [code_of("cuStreamQuery", stream), code_of("cuDevicePrimaryCtxRelease", 1)]
        calls.use(1)
        codes += [code_of("cuStreamQuery", stream), code_of("cuEventSynchronize", event)]
        gate.close()
        call("cuDevicePrimaryCtxRelease", 1)
        return codes

    found = calls.in_thread(on_the_other_card)
    assert found == [
        calls.CONTEXT_IS_DESTROYED,
        calls.INVALID_CONTEXT,
        calls.INVALID_HANDLE,
        calls.INVALID_HANDLE,
    ]
    assert fake.allocations(gpu=1) == []


def test_what_is_not_emulated_is_not_found(fake: fakecuda.Fake) -> None:
    with pytest.raises(RuntimeError, match="cuModuleLoad"):
        driver.cuModuleLoad(b"kernels.cubin")


# ---- building


def test_without_gcc_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="install gcc"):
        fakecuda.build(tmp_path)
