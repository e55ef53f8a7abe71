"""A component's range on the GPU, alone: each test is a program with a card of its own.

It makes chunks itself, as the daemon would, and sends them by `Files`.
"""

import pytest

from tests import fakecuda
from tests.processes import output_of

PRELUDE = """
import ctypes, os, sys, threading
from swapd.shared import protocol
from swapd.device.base import DeviceError
from swapd.device.driver import Access, Driver
from swapd.shared.fds import OwnedFd
from swapd_client.errors import DeviceFailed, DeviceMemoryExhausted, DeviceUnavailable
from swapd_client.session import files as files_module
from swapd_client.session.files import Files
from swapd_client.session.gpu import card as cards
from swapd_client.session.gpu import GpuRange
from swapd_client.session.gpu.card import Card

CHUNK, NBYTES = 2 << 20, (4 << 20) + 5000
daemon = Driver(0)
handles = {}

def make(number):
    "A chunk every byte of which is 100 + its number."
    with daemon.current():
        handles[number] = handle = daemon.create(CHUNK)
        at = daemon.reserve(CHUNK)
        daemon.map(at, CHUNK, handle)
        daemon.set_access(at, CHUNK, Access.READ_WRITE)
        daemon.call(daemon.api.cuMemsetD8, at, 100 + number, CHUNK)
        daemon.unmap(at, CHUNK)
        daemon.free(at, CHUNK)

def send(*numbers, writable=False):
    with daemon.current():
        fds = [daemon.export(handles[n]) for n in numbers]
    files.add(protocol.Files(numbers, writable), fds)

def lend(*numbers):
    with daemon.current():
        for number in numbers:
            daemon.release(handles.pop(number))

def free():
    with daemon.current():
        return daemon.memory()[0]

def look(where):
    "The first byte of each chunk, by the GPU."
    buffer = (ctypes.c_ubyte * 1)()
    found = []
    with daemon.current():
        for at in range(0, where.nbytes, CHUNK):
            daemon.call(daemon.api.cuMemcpyDtoH, ctypes.addressof(buffer), where.address + at, 1)
            found.append(buffer[0] - 100)
    return found

def refused(kind, call, *arguments):
    try:
        call(*arguments)
    except kind as exc:
        return str(exc)
    raise AssertionError("not refused")

files = Files(1)
welcome = protocol.Welcome(2, 1, b"", "", "cuda:0", CHUNK, 8, True, 1, daemon.uuid)
card = Card(welcome, files)
for number in range(8):
    make(number)
calls = {}
def count(name):
    "How often the driver was called so, from now on."
    calls[name] = 0
    real = getattr(Driver, name)
    def counted(*arguments, **options):
        calls[name] += 1
        return real(*arguments, **options)
    setattr(Driver, name, counted)
"""


def run(program: str, faults: str = "", **knobs: object) -> None:
    with fakecuda.machine(total=64 << 20, **knobs) as fake:
        if faults:
            fake.faults(faults)
        output_of(PRELUDE + program, env=fake.environment())
        assert fake.held_bytes() == 0


both_drivers = pytest.mark.parametrize("unmap_one", [False, True], ids=["at once", "one by one"])


@both_drivers
def test_the_same_address_whatever_is_behind(unmap_one: bool) -> None:
    run(
        """
where = GpuRange(NBYTES, card, writable=False)
address = where.address
send(0, 1, 2, 3, 4, 5, 6, 7)
for i in range(6):
    runs = ((0, 2), (5, 1)) if i % 2 else ((1, 1), (6, 2))
    where.show(i + 1, runs)
    assert look(where) == ([0, 1, 5] if i % 2 else [1, 6, 7])
    (where.hide, where.revoke)[i % 3 == 0](i + 1)
    assert not where.shown and where.address == address
""",
        unmap_one=unmap_one,
    )


@both_drivers
def test_where_nothing_stays_mapped_without_access_it_is_unmapped(unmap_one: bool) -> None:
    run(
        """
real = Driver.set_access
def only_some(self, address, nbytes, access):
    if access is Access.NONE:
        self.call(cuMemSetAccess)
    real(self, address, nbytes, access)
def cuMemSetAccess():
    return (daemon.api.CUresult.CUDA_ERROR_NOT_SUPPORTED,)
Driver.set_access = only_some
count("map")
where = GpuRange(NBYTES, card, writable=False)
send(0, 1, 2)
for i in range(4):
    where.show(i, ((0, 3),))
    assert look(where) == [0, 1, 2]
    where.hide(i)
assert calls["map"] == 4 * 3
""",
        unmap_one=unmap_one,
    )


def test_two_threads_that_are_granted_the_same_import_it_once() -> None:
    run("""
files_module.FILE_S = 1.0
where = GpuRange(NBYTES, card, writable=False)
importing, go_on, real = threading.Event(), threading.Event(), Driver.adopt
def adopt(self, fd):
    importing.set()
    go_on.wait()
    return real(self, fd)
Driver.adopt = adopt
asked = threading.Event()
real_imports = Card.imports
def imports(self, chunks, *, writable):
    if importing.is_set():
        asked.set()
    return real_imports(self, chunks, writable=writable)
Card.imports = imports
errors = []
def show():
    try:
        where.show(1, ((0, 3),))
    except Exception as exc:
        errors.append(exc)
threads = [threading.Thread(target=show) for _ in range(2)]
send(0, 1, 2)
threads[0].start()
importing.wait()
threads[1].start()
asked.wait()
go_on.set()
for thread in threads:
    thread.join()
assert not errors, errors
assert look(where) == [0, 1, 2]
""")


def test_a_chunk_that_could_not_be_imported_can_be_the_next_time() -> None:
    run("""
where = GpuRange(NBYTES, card, writable=False)
real = Driver.adopt
def adopt(self, fd):
    Driver.adopt = real
    raise DeviceError("for once")
Driver.adopt = adopt
send(0, 1, 2)
assert refused(DeviceFailed, where.show, 1, ((0, 3),)) == "for once"
where.show(1, ((0, 3),))
assert look(where) == [0, 1, 2]
""")


def test_a_chunk_is_imported_once_and_shown_again_by_one_call() -> None:
    run("""
for name in ("adopt", "map", "unmap", "set_access"):
    count(name)
where = GpuRange(NBYTES, card, writable=False)
send(0, 1, 2)
before = len(os.listdir("/proc/self/fd"))
for i in range(500):
    where.show(i, ((0, 3),))
    where.hide(i)
assert calls == {"adopt": 3, "map": 3, "unmap": 0, "set_access": 1000}, calls
for i in range(500, 520):
    where.show(i, ((0, 3),))
    where.revoke(i)
assert calls["adopt"] == 3
assert calls["map"] == 3 * 20
assert len(os.listdir("/proc/self/fd")) == before
""")


def test_dropped_chunks_are_free_memory() -> None:
    run("""
where = GpuRange(NBYTES, card, writable=True)
send(0, 1, 2, writable=True)
send(3)
before = free()
where.show(1, ((0, 3),))
where.hide(1)
lend(0, 1, 2, 3)
assert free() == before
where.drop((0, 1, 3))
card.drop((0, 1, 3))
assert free() == before + 3 * CHUNK
for number in (0, 1):
    make(number)
send(0, 1, writable=True)
where.show(2, ((0, 3),))
assert look(where) == [0, 1, 2]
""")


def test_a_late_revocation_takes_no_newer_chunks_away() -> None:
    run("""
where = GpuRange(NBYTES, card, writable=False)
send(0, 1, 2, 3, 4, 5)
where.show(1, ((0, 3),))
where.show(2, ((3, 3),))
where.revoke(1)
where.hide(1)
assert look(where) == [3, 4, 5]
where.show(3, ((3, 3),))
where.revoke(2)
assert where.is_shown(3) and look(where) == [3, 4, 5]
""")


def test_a_range_waits_for_chunks_and_meanwhile_for_nobody_else() -> None:
    """The thread that brings them has revocations to see to first."""
    run("""
where = GpuRange(NBYTES, card, writable=False)
send(0, 1)
showing = threading.Thread(target=where.show, args=(2, ((0, 3),)))
showing.start()
where.revoke(1)
card.drop((7,))
where.drop((7,))
send(2)
showing.join()
assert look(where) == [0, 1, 2]
""")


@pytest.mark.parametrize(
    "faults",
    ["cuMemMap 2 after=1 times=1", "cuMemImportFromShareableHandle 999 after=1 times=1"],
    ids=["map", "import"],
)
def test_a_failure_half_way_leaves_it_hidden_and_it_may_be_tried_again(faults: str) -> None:
    run(f"""
where = GpuRange(NBYTES, card, writable=False)
send(0, 1, 2)
import pathlib
faults = pathlib.Path(os.environ["FAKECUDA_FAULTS"])
faults.write_text("{faults}")
refused(DeviceFailed, where.show, 1, ((0, 3),))
assert not where.shown and where._mapped == ()
faults.write_text("")
files.drop((0, 1, 2))
send(0, 1, 2)
where.show(1, ((0, 3),))
assert look(where) == [0, 1, 2]
""")


def test_memory_of_its_own() -> None:
    run("""
master = OwnedFd(os.memfd_create("master"))
os.write(master.fileno(), bytes([107]) * NBYTES)
where = GpuRange(NBYTES, card, writable=False)
address = where.address
send(0, 1, 2)
where.show(1, ((0, 3),))
before = free()
where.set_memory_aside()
where.set_memory_aside()
assert free() == before - 3 * CHUNK, "as much as it needs, in units of the driver's"
where.give_memory_back()
where.give_memory_back()
assert free() == before
where.set_memory_aside()
where.make_private(master, keep_shown=False)
where.make_private(master, keep_shown=False)
assert where.address == address and look(where) == [7, 7, 7]
where.hide(); where.revoke(); where.revoke(9); where.drop((0, 1, 2))
assert look(where) == [7, 7, 7]
with daemon.current():
    daemon.call(daemon.api.cuMemsetD8, where.address, 109, NBYTES)
assert look(where) == [9, 9, 9]
master.close()
""")


def test_no_room_for_memory_of_its_own() -> None:
    run(
        """
master = OwnedFd(os.memfd_create("master"))
os.write(master.fileno(), bytes([107]) * NBYTES)
where = GpuRange(NBYTES, card, writable=False)
send(0, 1, 2)
where.show(1, ((0, 3),))
with daemon.current():
    taken = daemon.create(free() - CHUNK)
said = refused(DeviceMemoryExhausted, where.set_memory_aside)
assert "2 MiB are free, 4 MiB are missing" in said, said
assert look(where) == [0, 1, 2]
refused(DeviceMemoryExhausted, where.make_private, master)
assert not where.shown
with daemon.current():
    daemon.release(taken)
where.make_private(master, keep_shown=True)
assert look(where) == [0, 1, 2], "its chunks have the latest bytes, and are nobody else's"
master.close()
""".replace("where.make_private, master)", "lambda: where.make_private(master, keep_shown=False))")
    )


def test_what_was_saved_is_taken_from_the_master() -> None:
    run("""
master = OwnedFd(os.memfd_create("master"))
os.write(master.fileno(), bytes([107]) * NBYTES)
where = GpuRange(NBYTES, card, writable=True)
send(0, 1, 2, writable=True)
where.show(4, ((0, 3),))
where.revoke(4)
where.saved(3)
where.saved(4)
where.make_private(master, keep_shown=True)
assert look(where) == [7, 7, 7]
master.close()
""")


def test_once_the_gpu_is_lost_hiding_succeeds_and_showing_does_not() -> None:
    run("""
import logging
logging.disable()
where = GpuRange(NBYTES, card, writable=False)
send(0, 1, 2, 3, 4, 5)
where.show(1, ((0, 3),))
with card.using() as driver:
    driver.call(driver.api.cuMemsetD8Async, where.address, 1, 1, 0)
try:
    with card.using() as driver:
        driver.finish(0)
except DeviceFailed as exc:
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in str(exc) and "start it anew" in str(exc)
assert card.lost
where.hide(1)
where.revoke(1)
assert not where.shown
refused(DeviceFailed, where.show, 2, ((3, 3),))
refused(DeviceFailed, where.drop, (0,))
assert card.settle()
card.close(keep_context=False)
""")


def test_a_range_that_was_never_bound_is_freed() -> None:
    run("""
count("free")
where = GpuRange(NBYTES, card, writable=False)
send(0, 1, 2)
where.show(1, ((0, 3),))
where.set_memory_aside()
before = free()
where.discard()
assert calls["free"] == 1
assert free() == before + 3 * CHUNK
""")
