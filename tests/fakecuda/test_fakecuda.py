"""The fake driver keeps the driver's contract: memory, copies and streams in one process."""

import ctypes
import mmap
import os
import signal
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
    calls.end()


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


def copied_behind_a_gate(source: Host, stream: Any) -> bytes:
    """What arrives of a copy that the stream gets to when the source has changed."""
    address = memory()
    gate = Gate(stream)
    source[:3] = b"old"
    call("cuMemcpyHtoDAsync", address, source.address, 3, stream)
    source[:3] = b"new"
    gate.open()
    call("cuStreamSynchronize", stream)
    arrived = ctypes.string_at(address, 3)
    unmapped(address)
    gate.close()
    return arrived


def test_registered_memory_is_read_when_the_stream_gets_there(
    fake: fakecuda.Fake, stream: Any
) -> None:
    source = Host(4096).pin()
    assert copied_behind_a_gate(source, stream) == b"new"
    source.unpin()
    source.close()


def test_other_memory_has_been_read_when_the_call_returns(fake: fakecuda.Fake, stream: Any) -> None:
    source = Host(4096)
    assert copied_behind_a_gate(source, stream) == b"old"
    source.close()


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


# ---- streams and events


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


def test_what_is_not_emulated_is_not_found(fake: fakecuda.Fake) -> None:
    with pytest.raises(RuntimeError, match="cuModuleLoad"):
        driver.cuModuleLoad(b"kernels.cubin")
