"""The contract of `swapd.device.base.Device`, held against every backend.

A backend joins by an entry in BACKENDS: how to open it, and how another process gets at
the memory behind a descriptor.
"""

import ctypes
import os
import random
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from swapd.device import Device, DeviceError, HostDevice
from swapd.protocol import Runs
from tests.processes import output_of, start_python

CHUNK = 2 << 20
CHUNKS = 8


@dataclass(frozen=True)
class Backend:
    """`map_chunk` is Python that another process runs: with `fd`, `chunk` (the number of
    one), `CHUNK` and `writable` set, it maps that chunk and sets `at` to its address."""

    open: Callable[[int, int], Device]
    map_chunk: str


BACKENDS = {
    "host": Backend(
        open=lambda budget, chunk: HostDevice(budget, chunk),
        map_chunk="at = vm.map_shared(fd, chunk * CHUNK, CHUNK, writable=writable)",
    ),
}


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@pytest.fixture
def device(backend: Backend) -> Iterator[Device]:
    device = backend.open(CHUNKS * CHUNK, CHUNK)
    yield device
    device.close()


class HostBytes:
    """Private memory as the source or target of copies, with bytes around it to watch."""

    MARGIN = 4096

    def __init__(self, nbytes: int, content: bytes = b"") -> None:
        self._whole = bytearray(b"\xee" * (nbytes + 2 * self.MARGIN))
        self._view = memoryview(self._whole)[self.MARGIN : self.MARGIN + nbytes]
        self._view[: len(content)] = content
        self.nbytes = nbytes
        array = (ctypes.c_ubyte * len(self._whole)).from_buffer(self._whole)
        self.address = ctypes.addressof(array) + self.MARGIN

    def __bytes__(self) -> bytes:
        around = self._whole[: self.MARGIN], self._whole[self.MARGIN + self.nbytes :]
        assert all(part == b"\xee" * self.MARGIN for part in around), "written beside the target"
        return bytes(self._view)


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
    before = open_fds()
    with pytest.raises(DeviceError, match="bytes"):
        backend.open(budget, chunk)
    assert open_fds() == before


def test_open_and_close_leave_no_descriptor_and_no_mapping(backend: Backend) -> None:
    backend.open(CHUNK, CHUNK).close()
    before = open_fds()
    device = backend.open(CHUNKS * CHUNK, CHUNK)
    copy_in(device, ((0, 1),), b"x")
    for writable in (False, True):
        device.export(writable=writable).close()
    device.close()
    assert open_fds() == before


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
    expected[1 * CHUNK : 2 * CHUNK + 7] = content[CHUNK:]
    assert after == bytes(expected)


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


# --- export ------------------------------------------------------------------------------

CHILD = """
import ctypes, os, sys, zlib
from swapd.device import vm
fd, chunk, CHUNK, writable = map(int, sys.argv[1:5])
"""


def in_another_process(
    backend: Backend, device: Device, program: str, *, chunk: int = 0, writable: bool
) -> str:
    """What `program` prints where `chunk` is mapped at `at` from an export of its own."""
    with device.export(writable=writable) as fd:
        number = fd.fileno()
        child = CHILD + backend.map_chunk + "\n" + program
        return output_of(child, number, chunk, CHUNK, int(writable), fds=[number]).strip()


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("chunk", [0, 1, CHUNKS - 1])
def test_another_process_sees_each_chunk_at_its_place(
    backend: Backend, device: Device, chunk: int, writable: bool
) -> None:
    copy_in(device, ((0, CHUNKS),), content := noise(CHUNKS * CHUNK))
    show = "print(zlib.crc32(vm.view(at, CHUNK)))"
    seen = in_another_process(backend, device, show, chunk=chunk, writable=writable)
    assert int(seen) == zlib.crc32(content[chunk * CHUNK : (chunk + 1) * CHUNK])


def test_what_another_process_writes_through_a_writable_export_is_copied_out(
    backend: Backend, device: Device
) -> None:
    copy_in(device, ((0, CHUNKS),), bytes(CHUNKS * CHUNK))
    in_another_process(backend, device, "vm.view(at, 5)[:] = b'hello'", chunk=2, writable=True)
    assert copy_out(device, ((1, 2),), CHUNK + 5) == bytes(CHUNK) + b"hello"


def test_a_read_only_export_can_never_be_mapped_writable(backend: Backend, device: Device) -> None:
    attempts = """
writable = True
try:
    MAP
except OSError as exc:
    print(exc.strerror)
writable = False
MAP
mprotect = ctypes.CDLL(None, use_errno=True).mprotect
mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
print(mprotect(at, CHUNK, vm.PROT_READ | vm.PROT_WRITE), os.strerror(ctypes.get_errno()))
"""
    program = attempts.replace("MAP", backend.map_chunk)
    said = in_another_process(backend, device, program, writable=False)
    assert said.splitlines() == ["Permission denied", "-1 Permission denied"]


def test_exports_are_not_inherited(device: Device) -> None:
    for writable in (False, True):
        with device.export(writable=writable) as fd:
            assert not os.get_inheritable(fd.fileno())


def test_a_mapping_outlives_the_device(backend: Backend) -> None:
    device = backend.open(CHUNKS * CHUNK, CHUNK)
    copy_in(device, ((3, 1),), content := noise(CHUNK))
    program = """
print("mapped", flush=True)
sys.stdin.readline()
print(zlib.crc32(vm.view(at, CHUNK)))
"""
    with device.export(writable=False) as fd:
        number = fd.fileno()
        child = start_python(CHILD + backend.map_chunk + program, number, 3, CHUNK, 0, fds=[number])
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "mapped\n"
        device.close()
        child.stdin.write("now\n")
        child.stdin.flush()
        assert int(child.stdout.readline()) == zlib.crc32(content)
    assert child.returncode == 0
