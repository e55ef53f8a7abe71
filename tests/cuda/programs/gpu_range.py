"""A component's range on a GPU, alone. `python gpu_range.py CASE` runs the function CASE."""

import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

from swapd.device.base import DeviceError
from swapd.device.driver import Access, Driver
from swapd.shared.board import Board, Boards
from swapd.shared.fds import OwnedFd
from swapd_client.errors import DeviceFailed, OutOfMemory
from swapd_client.session import life
from swapd_client.session.gpu.card import Card
from swapd_client.session.gpu.streams import Doorbell
from tests.cuda.programs.lone_gpu import CHUNK, NBYTES, LoneGpu, count, put, refused
from tests.interrupts import interrupt, interrupts, places
from tests.threads import started


def master() -> OwnedFd:
    """A host copy's file: every byte is 107, as in chunk 7."""
    fd = OwnedFd(os.memfd_create("master"))
    os.write(fd.fileno(), bytes([107]) * NBYTES)
    return fd


def sent(*chunks: int, writable: bool = False) -> tuple[LoneGpu, Any]:
    """A GPU, and a range of it whose process has these chunks."""
    gpu = LoneGpu()
    where = gpu.range(writable=writable)
    gpu.send(*chunks, writable=writable)
    return gpu, where


def shown_at_one_address() -> None:
    gpu = LoneGpu()
    where = gpu.range()
    address = where.address
    gpu.send(0, 1, 2, 3, 4, 5, 6, 7)
    for i in range(6):
        runs = ((0, 2), (5, 1)) if i % 2 else ((1, 1), (6, 2))
        where.show(i + 1, runs)
        assert gpu.look(where) == ([0, 1, 5] if i % 2 else [1, 6, 7])
        (where.hide, where.revoke)[i % 3 == 0](i + 1)
        assert not where.shown
        assert where.address == address


def without_mappings_that_nobody_may_use() -> None:
    gpu = LoneGpu()

    def cuMemSetAccess() -> tuple[Any]:
        return (gpu.daemon.api.CUresult.CUDA_ERROR_NOT_SUPPORTED,)

    def only_some(self: Driver, address: int, nbytes: int, access: Access) -> None:
        if access is Access.NONE:
            self.call(cuMemSetAccess)
        real(self, address, nbytes, access)

    real = put(Driver, "set_access", only_some)
    calls = count("map")
    where = gpu.range()
    gpu.send(0, 1, 2)
    for i in range(4):
        where.show(i, ((0, 3),))
        assert gpu.look(where) == [0, 1, 2]
        where.hide(i)
    assert calls["map"] == 4 * 3


def reached_and_interrupted() -> None:
    _, where = sent(0, 1, 2)
    accessible: set[int] = set()

    def set_access(self: Driver, address: int, nbytes: int, access: Access) -> None:
        real(self, address, nbytes, access)
        first = (address - where.address) // CHUNK
        chunks = range(first, first + nbytes // CHUNK)
        (accessible.difference_update if access is Access.NONE else accessible.update)(chunks)

    def use() -> None:
        where.lend(1, ((0, 3),))
        where.reach(1, 1)
        where.reach(1, CHUNK + 1)
        where.hide(1)

    real = put(Driver, "set_access", set_access)
    with interrupts():
        use()
        for place in places(use, most=1000):
            interrupt(use, place)
            where.hide(1)
            assert not accessible, place
            where.lend(1, ((0, 3),))
            interrupt(lambda: where.reach(1, CHUNK + 1), place)
            where.reach(1, CHUNK + 1)
            assert accessible == {0, 1}, place
            where.hide(1)
            assert not accessible, place


def reached_without_a_lease() -> None:
    gpu, where = sent(0, 1, 2)
    calls = count("set_access")
    where.reach(1, NBYTES)
    where.lend(1, ((0, 3),))
    assert where.shown
    assert not where.is_shown(1)
    where.reach(1, 0)
    where.reach(0, NBYTES)
    where.hide(1)
    where.reach(1, NBYTES)
    assert calls["set_access"] == 0
    where.lend(1, ((0, 3),))
    where.reach(1, NBYTES)
    assert where.is_shown(1)
    assert gpu.look(where) == [0, 1, 2]


def imported_by_two_threads() -> None:
    gpu = LoneGpu()
    vars(life)["FILE_S"] = 1.0
    where = gpu.range()
    importing, go_on, asked = threading.Event(), threading.Event(), threading.Event()
    errors = []

    def adopt(self: Driver, fd: int) -> int:
        importing.set()
        go_on.wait()
        return int(real_adopt(self, fd))

    def imports(self: Card, chunks: tuple[int, ...], *, writable: bool) -> Any:
        if importing.is_set():
            asked.set()
        return real_imports(self, chunks, writable=writable)

    def show() -> None:
        try:
            where.show(1, ((0, 3),))
        except Exception as exc:  # noqa: BLE001 - the test sees it
            errors.append(exc)

    real_adopt, real_imports = put(Driver, "adopt", adopt), put(Card, "imports", imports)
    threads = [threading.Thread(target=show) for _ in range(2)]
    gpu.send(0, 1, 2)
    threads[0].start()
    importing.wait()
    threads[1].start()
    asked.wait()
    go_on.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert gpu.look(where) == [0, 1, 2]


def imported_the_second_time() -> None:
    gpu = LoneGpu()
    where = gpu.range()

    def adopt(self: Driver, fd: int) -> int:
        put(Driver, "adopt", real)
        raise DeviceError("for once")

    real = put(Driver, "adopt", adopt)
    gpu.send(0, 1, 2)
    said = refused(DeviceFailed, where.show, 1, ((0, 3),))
    assert said.startswith("cuda:0: for once. "), said
    where.show(1, ((0, 3),))
    assert gpu.look(where) == [0, 1, 2]


def imported_once() -> None:
    gpu = LoneGpu()
    calls = count("adopt", "map", "unmap", "set_access")
    where = gpu.range()
    gpu.send(0, 1, 2)
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
    assert calls["unmap"] == 20
    assert len(os.listdir("/proc/self/fd")) == before


def dropped() -> None:
    gpu, where = sent(0, 1, 2, writable=True)
    gpu.send(3)
    before = gpu.free()
    where.show(1, ((0, 3),))
    where.hide(1)
    gpu.lend(0, 1, 2, 3)
    assert gpu.free() == before
    where.drop((0, 1, 3))
    gpu.card.drop((0, 1, 3))
    assert gpu.free() == before + 3 * CHUNK
    for number in (0, 1):
        gpu.make(number)
    gpu.send(0, 1, writable=True)
    where.show(2, ((0, 3),))
    assert gpu.look(where) == [0, 1, 2]


def revoked_late() -> None:
    gpu, where = sent(0, 1, 2, 3, 4, 5)
    where.show(1, ((0, 3),))
    where.show(2, ((3, 3),))
    where.revoke(1)
    where.hide(1)
    assert gpu.look(where) == [3, 4, 5]
    where.show(3, ((3, 3),))
    where.revoke(2)
    assert where.is_shown(3)
    assert gpu.look(where) == [3, 4, 5]


def waiting_for_chunks() -> None:
    gpu, where = sent(0, 1)
    showing = started(where.show, 2, ((0, 3),))
    where.revoke(1)
    gpu.card.drop((7,))
    where.drop((7,))
    gpu.send(2)
    showing.join()
    assert gpu.look(where) == [0, 1, 2]


def failing_half_way(fault: str) -> None:
    gpu, where = sent(0, 1, 2)
    faults = Path(os.environ["FAKECUDA_FAULTS"])  # noqa: TID251
    faults.write_text(fault)
    refused(DeviceFailed, where.show, 1, ((0, 3),))
    assert not where.shown
    assert where._mapped == ()
    faults.write_text("")
    gpu.files.drop((0, 1, 2))
    gpu.send(0, 1, 2)
    where.show(1, ((0, 3),))
    assert gpu.look(where) == [0, 1, 2]


def with_memory_of_its_own() -> None:
    gpu = LoneGpu()
    where = gpu.range()
    address = where.address
    gpu.send(0, 1, 2)
    where.show(1, ((0, 3),))
    before = gpu.free()
    where.set_memory_aside()
    where.set_memory_aside()
    assert gpu.free() == before - 3 * CHUNK, "as much as it needs, in units of the driver's"
    where.give_memory_back()
    where.give_memory_back()
    assert gpu.free() == before
    where.set_memory_aside()
    with master() as fd:
        where.make_private(fd, keep_shown=False)
        where.make_private(fd, keep_shown=False)
    assert where.address == address
    assert gpu.look(where) == [7, 7, 7]
    where.hide()
    where.revoke()
    where.revoke(9)
    where.drop((0, 1, 2))
    where.show(2, ((0, 3),))  # of a lease that came late
    where.put(3, ((0, 3),))
    where.lend(3, ((0, 3),))
    assert gpu.look(where) == [7, 7, 7]
    with gpu.daemon.current():
        gpu.daemon.call(gpu.daemon.api.cuMemsetD8, where.address, 109, NBYTES)
    assert gpu.look(where) == [9, 9, 9]


def taken_over() -> None:
    gpu = LoneGpu()
    gpu.send(0, 1, 2)
    with master() as fd:
        for stays in (False, True):
            before = gpu.range()
            before.make_private(fd, keep_shown=False)
            free = gpu.free()
            where = gpu.range(before=before)
            if stays:
                assert where.stay_private()
            where.give_up_private()
            assert gpu.free() == free + (0 if stays else 3 * CHUNK)
            where.show(1, ((0, 3),))
            assert gpu.look(where) == ([7, 7, 7] if stays else [0, 1, 2])


def let_go() -> None:
    _, where = sent(0, 1, 2)
    where.show(1, ((0, 3),))
    where.let_go()
    assert not where.shown
    assert not where.on_chunks


def waited_for_by_a_stream() -> None:
    calls = count("event", "destroy_event")
    doorbell = Doorbell(LoneGpu().card, Board(Boards().fd))
    assert doorbell.wait(0, 1, 0)
    doorbell.close()
    assert calls == {"event": 1, "destroy_event": 1}


def refused_memory_of_its_own() -> None:
    faults = Path(os.environ["FAKECUDA_FAULTS"])  # noqa: TID251
    where = LoneGpu().range()
    faults.write_text("cuMemCreate 1")
    said = refused(DeviceFailed, where.set_memory_aside)
    assert "CUDA_ERROR_INVALID_VALUE" in said, said


def without_room_for_memory_of_its_own() -> None:
    gpu, where = sent(0, 1, 2)
    where.show(1, ((0, 3),))
    with gpu.daemon.current():
        taken = gpu.daemon.create(gpu.free() - CHUNK)
    said = refused(OutOfMemory, where.set_memory_aside)
    assert "2 MiB are free, 4 MiB are missing" in said, said
    assert gpu.look(where) == [0, 1, 2]
    with master() as fd:
        refused(OutOfMemory, where.make_private, fd, keep_shown=False)
        assert not where.shown
        with gpu.daemon.current():
            gpu.daemon.release(taken)
        where.make_private(fd, keep_shown=True)
    assert gpu.look(where) == [0, 1, 2], "its chunks have the latest bytes, and are nobody else's"


def saved() -> None:
    gpu, where = sent(0, 1, 2, writable=True)
    where.show(4, ((0, 3),))
    where.revoke(4)
    where.saved(3)
    where.saved(4)
    with master() as fd:
        where.make_private(fd, keep_shown=True)
    assert gpu.look(where) == [7, 7, 7]


def on_a_lost_gpu() -> None:
    logging.disable()
    gpu = LoneGpu()
    where, card = gpu.range(), gpu.card
    gpu.send(0, 1, 2, 3, 4, 5)
    where.show(1, ((0, 3),))
    with card.using() as driver:
        driver.call(driver.api.cuMemsetD8Async, where.address, 1, 1, 0)
    try:
        with card.using() as driver:
            driver.finish(0)
    except DeviceFailed as exc:
        said = str(exc)
        assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in said
        assert "start it again" in said
    assert card.lost
    where.hide(1)
    where.revoke(1)
    assert not where.shown
    refused(DeviceFailed, where.show, 2, ((3, 3),))
    refused(DeviceFailed, where.drop, (0,))
    assert card.settle()
    card.close(keep_context=False)


def never_bound() -> None:
    gpu = LoneGpu()
    calls = count("free")
    where = gpu.range()
    gpu.send(0, 1, 2)
    where.show(1, ((0, 3),))
    where.set_memory_aside()
    before = gpu.free()
    where.discard()
    assert calls["free"] == 1
    assert gpu.free() == before + 3 * CHUNK


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
