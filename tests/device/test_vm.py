"""Address space by hand: allowed and forbidden accesses, and pages that survive a move.

Each faulting case runs in a process of its own: the signal is the assertion.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

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


def mapped(address: int, nbytes: int) -> bool:
    """Whether the range contains a mapping or a reservation."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(text, 16) for text in line.split(maxsplit=1)[0].split("-"))
        if start < address + nbytes and end > address:
            return True
    return False


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


def test_reserving_takes_address_space_only() -> None:
    at = vm.reserve(1 << 40)
    assert present_bytes(at) == 0
    vm.free(at, 1 << 40)


def test_free_gives_the_range_back() -> None:
    at = vm.reserve(NBYTES)
    assert mapped(at, NBYTES)
    vm.free(at, NBYTES)
    assert not mapped(at, NBYTES)


def test_what_the_kernel_refuses_is_an_oserror() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        vm.free(vm.PAGE_BYTES + 1, vm.PAGE_BYTES)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        vm.reserve(1 << 60)
    with pytest.raises(OSError, match="Bad file descriptor"):
        vm.map_shared(-1, 0, vm.PAGE_BYTES, writable=False)


# --- map ---------------------------------------------------------------------------------


def test_a_mapping_stands_where_it_was_asked_to(arena: int) -> None:
    at = vm.reserve(NBYTES)
    assert vm.map_shared(arena, 0, NBYTES, writable=False, at=at) == at
    assert bytes(vm.view(at, NBYTES)) == bytes_of(arena)
    vm.free(at, NBYTES)


def test_a_writable_mapping_writes_the_memory_itself(arena: int) -> None:
    at = vm.map_shared(arena, vm.PAGE_BYTES, vm.PAGE_BYTES, writable=True)
    vm.view(at, 5)[:] = b"hello"
    vm.free(at, vm.PAGE_BYTES)
    assert bytes_of(arena)[vm.PAGE_BYTES : vm.PAGE_BYTES + 5] == b"hello"


def test_a_read_only_mapping_may_be_read_but_not_written() -> None:
    faults("write_read_only")


def test_a_private_view_reads_the_file_and_keeps_its_writes_to_itself(arena: int) -> None:
    before = bytes_of(arena)
    at = vm.reserve(NBYTES)
    vm.map_private(arena, NBYTES, at=at)
    assert bytes(vm.view(at, NBYTES)) == before
    vm.view(at, 5)[:] = b"hello"
    assert bytes(vm.view(at, 5)) == b"hello"
    assert bytes_of(arena) == before
    vm.free(at, NBYTES)


def test_populate_makes_every_page_present(arena: int) -> None:
    for writable in (False, True):
        at = vm.map_shared(arena, 0, NBYTES, writable=writable)
        assert present_bytes(at) < NBYTES
        vm.populate(at, NBYTES, writable=writable)
        assert present_bytes(at) == NBYTES
        vm.free(at, NBYTES)


def test_populating_for_writing_what_may_not_be_written_is_an_oserror(arena: int) -> None:
    at = vm.map_shared(arena, 0, NBYTES, writable=False)
    with pytest.raises(OSError, match="Invalid argument"):
        vm.populate(at, NBYTES, writable=True)
    vm.free(at, NBYTES)


# --- shelve ------------------------------------------------------------------------------


def test_pages_keep_their_content_on_the_shelf_and_back(arena: int) -> None:
    at, shelf = vm.reserve(NBYTES), vm.reserve(NBYTES)
    vm.map_shared(arena, 0, NBYTES, writable=True, at=at)
    vm.populate(at, NBYTES, writable=True)
    for _ in range(3):
        vm.move_pages(at, shelf, NBYTES)
        vm.protect_none(at, NBYTES)
        os.pwrite(arena, b"while out", 0)
        vm.move_pages(shelf, at, NBYTES)
        assert bytes(vm.view(at, NBYTES)) == bytes_of(arena)
        vm.view(at, 9)[:] = b"once more"
        assert bytes_of(arena)[:9] == b"once more"
    vm.free(at, NBYTES)
    vm.free(shelf, NBYTES)


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


def test_private_pages_can_be_moved_too() -> None:
    at, there = vm.map_anonymous(NBYTES), vm.map_anonymous(NBYTES)
    vm.view(at, 5)[:] = b"hello"
    vm.move_pages(at, there, NBYTES)
    assert bytes(vm.view(there, 5)) == b"hello"
    assert bytes(vm.view(at, 5)) == bytes(5), "the source stays mapped, and is empty"
    vm.free(at, NBYTES)
    vm.free(there, NBYTES)


# --- revoke ------------------------------------------------------------------------------


def test_a_revoked_range_may_not_be_touched() -> None:
    faults("read_revoked")


def test_a_revoked_range_can_be_mapped_again(arena: int) -> None:
    at = vm.map_shared(arena, 0, NBYTES, writable=False)
    vm.revoke(at, NBYTES)
    vm.map_shared(arena, 0, NBYTES, writable=False, at=at)
    assert bytes(vm.view(at, NBYTES)) == bytes_of(arena)
    vm.free(at, NBYTES)


def test_memory_that_is_mapped_nowhere_else_is_given_back_by_revoke() -> None:
    at = vm.map_anonymous(NBYTES, at=vm.reserve(NBYTES))
    vm.populate(at, NBYTES, writable=True)
    assert present_bytes(at) == NBYTES
    vm.revoke(at, NBYTES)
    assert present_bytes(at) == 0
    vm.free(at, NBYTES)


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


def test_round_up() -> None:
    assert [vm.round_up(n, 256) for n in (0, 1, 255, 256, 257)] == [0, 256, 256, 256, 512]
    assert vm.round_up(1) == vm.PAGE_BYTES


def test_a_view_writes_through_and_may_be_empty() -> None:
    at = vm.map_anonymous(vm.PAGE_BYTES)
    vm.view(at, 3)[1:] = b"ab"
    assert bytes(vm.view(at, 4)) == b"\0ab\0"
    assert len(vm.view(at, 0)) == 0
    vm.free(at, vm.PAGE_BYTES)


def test_a_hole_gives_memory_back_and_reads_as_zeros(arena: int) -> None:
    at = vm.map_shared(arena, 0, NBYTES, writable=True)
    vm.populate(at, NBYTES, writable=True)
    before = os.fstat(arena).st_blocks
    vm.punch(arena, NBYTES // 4, NBYTES // 2)
    assert os.fstat(arena).st_blocks == before // 2
    assert os.fstat(arena).st_size == NBYTES
    assert bytes(vm.view(at + NBYTES // 4, NBYTES // 2)) == bytes(NBYTES // 2)
    assert bytes(vm.view(at + vm.PAGE_BYTES, 2)) == b"\1\0"
    vm.free(at, NBYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        vm.punch(-1, 0, NBYTES)
