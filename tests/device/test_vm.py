"""Address space by hand: allowed and forbidden accesses, and pages that survive a move.

Each faulting case runs in a process of its own: the signal is the assertion.
"""

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from swapd.shared import vm
from tests.processes import output_of, run_python

NBYTES = 4 << 20

PROGRAM = Path(__file__).parent / "programs" / "address_space.py"


def ends_well(case: str) -> None:
    output_of(PROGRAM, case)


def faults(case: str) -> None:
    """All of it runs but its last line, which faults."""
    done = run_python(PROGRAM, case)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "alive\n"), done.stderr


@pytest.fixture
def arena() -> Iterator[int]:
    """A memfd of NBYTES bytes; every page holds its own number."""
    fd = os.memfd_create("arena")
    pages = range(NBYTES // vm.PAGE_BYTES)
    os.write(fd, b"".join(page.to_bytes(2, "little") * (vm.PAGE_BYTES // 2) for page in pages))
    yield fd
    os.close(fd)


def bytes_of(fd: int) -> bytes:
    return os.pread(fd, NBYTES, 0)


def present_bytes(address: int) -> int:
    """The bytes in memory of the mapping that begins at `address`."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            break
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


# --- reserve and free --------------------------------------------------------------------


@pytest.mark.parametrize("touch", ["read_reserved", "write_reserved"])
def test_a_reserved_range_may_not_be_touched(touch: str) -> None:
    faults(touch)


def test_a_reserved_range_is_aligned_for_whole_page_tables() -> None:
    ranges = [vm.reserve(n * vm.PAGE_BYTES) for n in (1, 3, 513)]
    assert all(at % (2 << 20) == 0 for at in ranges)
    for at, n in zip(ranges, (1, 3, 513), strict=True):
        vm.free(at, n * vm.PAGE_BYTES)


def test_what_the_kernel_refuses_is_an_oserror() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        vm.free(vm.PAGE_BYTES + 1, vm.PAGE_BYTES)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        vm.reserve(1 << 60)
    with pytest.raises(OSError, match="Bad file descriptor"):
        vm.map_shared(-1, 0, vm.PAGE_BYTES, writable=False)


# --- map ---------------------------------------------------------------------------------


def test_a_read_only_mapping_may_be_read_but_not_written() -> None:
    faults("write_read_only")


def test_populate_makes_every_page_present(arena: int) -> None:
    for writable in (False, True):
        at = vm.map_shared(arena, 0, NBYTES, writable=writable)
        assert present_bytes(at) < NBYTES
        vm.populate(at, NBYTES, writable=writable)
        assert present_bytes(at) == NBYTES
        vm.free(at, NBYTES)


@pytest.mark.parametrize("writable", [False, True])
def test_without_a_call_for_it_every_page_is_present_all_the_same(
    arena: int, writable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(vm, "populate_in_one", refuse)
    before = bytes_of(arena)
    at = vm.map_shared(arena, 0, NBYTES, writable=writable)
    assert present_bytes(at) == 0
    vm.populate(at, NBYTES, writable=writable)
    assert present_bytes(at) == NBYTES
    vm.free(at, NBYTES)
    assert bytes_of(arena) == before


def test_populating_for_writing_what_may_not_be_written_is_an_oserror(arena: int) -> None:
    at = vm.map_shared(arena, 0, NBYTES, writable=False)
    with pytest.raises(OSError, match="Invalid argument"):
        vm.populate_in_one(at, NBYTES, writable=True)
    vm.free(at, NBYTES)


# --- shelve ------------------------------------------------------------------------------


def test_pages_that_were_shelved_come_back_without_faulting(arena: int) -> None:
    at, shelf = vm.reserve(NBYTES), vm.reserve(NBYTES)
    vm.map_shared(arena, 0, NBYTES, writable=False, at=at)
    vm.populate(at, NBYTES, writable=False)
    vm.move_pages(at, shelf, NBYTES)
    vm.protect_none(at, NBYTES)
    vm.move_pages(shelf, at, NBYTES)
    assert present_bytes(at) == NBYTES
    vm.free(at, NBYTES)
    vm.free(shelf, NBYTES)


def test_a_shelved_range_may_not_be_touched() -> None:
    faults("read_shelved")


def test_what_comes_back_from_the_shelf_is_as_read_only_as_before() -> None:
    faults("write_read_only_from_the_shelf")


# --- revoke ------------------------------------------------------------------------------


def test_a_revoked_range_may_not_be_touched() -> None:
    faults("read_revoked")


# --- fork --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fork_with_writable", "fork_with_read_only"])
def test_a_forked_child_that_touches_a_mapping_dies(how: str) -> None:
    ends_well(how)


def test_a_forked_child_has_no_mapping_either_after_a_stay_on_the_shelf() -> None:
    ends_well("fork_after_the_shelf")


@pytest.mark.parametrize("how", ["fork_with_private", "fork_with_anonymous"])
def test_private_memory_is_a_child_s_as_any_other(how: str) -> None:
    ends_well(how)


# --- units -------------------------------------------------------------------------------
