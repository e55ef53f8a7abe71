"""A component's range: one address for good, with bytes there only while they may be touched.

In this process `shown` says whether they may; children prove it by the signal that ends them.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapd.shared import protocol, vm
from swapd.shared.fds import OwnedFd, reopen_read_only
from swapd.shared.protocol import Runs
from swapd_client.memory.mapping import Range
from swapd_client.session.life import Files
from tests.processes import output_of, run_python

CHUNK = 2 << 20
CHUNKS = 8
#: Two chunks and a bit: the component ends inside its third.
NBYTES = 2 * CHUNK + 5000

HERE: Runs = ((1, 2), (5, 1))
THERE: Runs = ((0, 1), (6, 2))


class World:
    """An arena in which every byte of chunk i is 100 + i, a host copy, and their mappings."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self.fd = OwnedFd(os.memfd_create("test-arena"))
        for chunk in range(CHUNKS):
            os.write(self.fd.fileno(), bytes([100 + chunk]) * CHUNK)
        self.reader = reopen_read_only(self.fd.fileno())
        self.files = Files(CHUNKS)
        for writable, fd in ((False, self.reader), (True, self.fd)):
            self.files.add(protocol.Files((0,), writable), [OwnedFd(os.dup(fd.fileno()))])
        self.master = OwnedFd(os.memfd_create("test-master"))
        os.write(self.master.fileno(), b"\x07" * NBYTES)

    def shown(self, *, writable: bool = False) -> Range:
        """A range with a generation of it shown."""
        where = self.range(writable=writable)
        where.show(1, HERE)
        return where

    def range(self, nbytes: int = NBYTES, *, writable: bool = False) -> Range:
        made = Range(nbytes, CHUNK, self.files, writable=writable)
        self.ranges.append(made)
        return made

    def close(self) -> None:
        """Free the memory: ranges are never freed, and their mappings would keep it."""
        for where in self.ranges:
            where.make_private(self.master, keep_shown=False)
            vm.revoke(where.address, vm.round_up(max(where.nbytes, 1), CHUNK))
        self.files.close()
        for fd in (self.fd, self.reader, self.master):
            fd.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def bytes_at(where: Range) -> bytes:
    assert where.shown
    return bytes(vm.view(where.address, where.nbytes))


def of_chunks(runs: Runs, nbytes: int = NBYTES) -> bytes:
    chunks = [chunk for first, n in runs for chunk in range(first, first + n)]
    return b"".join(bytes([100 + chunk]) * CHUNK for chunk in chunks)[:nbytes]


def mapped_from(where: Range, name: str) -> bool:
    """Whether any byte of the range, or of its last chunk, is mapped from the memfd `name`."""
    end = where.address + vm.round_up(max(where.nbytes, 1), CHUNK)
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(text, 16) for text in line.split(maxsplit=1)[0].split("-"))
        if start < end and stop > where.address and f"memfd:{name}" in line:
            return True
    return False


# --- show and hide -----------------------------------------------------------------------


def test_the_same_chunks_come_back_from_the_shelf(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = world.shown()
    where.hide(1)
    monkeypatch.setattr(vm, "map_shared", None)
    where.show(2, HERE)
    assert bytes_at(where) == of_chunks(HERE)


@pytest.mark.parametrize("late", [False, True])
def test_other_chunks_replace_those_on_the_shelf_or_shown(world: World, late: bool) -> None:
    """If the revocation in between is late, it must not remove the new chunks."""
    where = world.range()
    for generation, chunks in enumerate((HERE, THERE, HERE), 1):
        where.show(generation, chunks)
        assert bytes_at(where) == of_chunks(chunks)
        where.hide(generation - 1 if late else generation)
        assert where.shown == late


def test_hide_with_a_newer_generation_or_none_hides(world: World) -> None:
    where = world.shown()
    where.hide(2)
    assert not where.shown
    where.show(3, HERE)
    where.hide()
    assert not where.shown
    where.hide()


def test_showing_what_is_shown_maps_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    where = world.shown()
    monkeypatch.setattr(vm, "map_shared", None)
    monkeypatch.setattr(vm, "move_pages", None)
    where.show(1, HERE)
    where.show(2, HERE)
    where.hide(1)
    assert where.shown, "generation 2 is the one that counts"


def test_a_kernel_that_cannot_shelve_unmaps_and_maps_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(source: int, target: int, nbytes: int) -> None:
        raise OSError(22, "Invalid argument")

    where = world.shown()
    with monkeypatch.context() as patch:
        patch.setattr(vm, "move_pages", cannot)
        where.hide(1)
        assert not where.shown
        assert not mapped_from(where, "test-arena")
        where.show(2, HERE)
        where.hide(2)
    where.show(3, THERE)
    assert bytes_at(where) == of_chunks(THERE)


@pytest.mark.parametrize("failing", [1, 2])
def test_shelving_that_fails_midway_leaves_nothing_half_shown(
    world: World, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    where = world.shown()
    moved = []
    move_pages = vm.move_pages

    def sometimes(source: int, target: int, nbytes: int) -> None:
        moved.append(source)
        if len(moved) == failing:
            raise OSError(12, "Cannot allocate memory")
        move_pages(source, target, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(vm, "move_pages", sometimes)
        where.hide(1)
    assert not mapped_from(where, "test-arena")
    where.show(2, HERE)
    assert bytes_at(where) == of_chunks(HERE)


# --- faults ------------------------------------------------------------------------------

PROGRAM = Path(__file__).parent / "programs" / "mapped_range.py"


@pytest.mark.parametrize(
    "case",
    ["new", "hidden", "hidden_in_runs", "hidden_again", "written", "written_when_back"],
)
def test_a_stray_access_ends_the_process(case: str) -> None:
    assert run_python(PROGRAM, case).returncode == -signal.SIGSEGV


def test_a_forked_child_has_private_bytes_but_none_of_the_arena_s() -> None:
    output_of(PROGRAM, "fork")


# --- private -----------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [False, True])
def test_keep_shown_keeps_the_bytes_of_the_chunks(world: World, hidden: bool) -> None:
    where = world.shown(writable=True)
    vm.view(where.address, 5)[:] = b"hello"
    if hidden:
        where.hide(1)
    where.make_private(world.master, keep_shown=True)
    assert bytes_at(where) == b"hello" + of_chunks(HERE)[5:]


@pytest.mark.parametrize("hidden", [False, True])
def test_keep_shown_takes_the_master_once_the_bytes_are_saved(world: World, hidden: bool) -> None:
    where = world.shown(writable=True)
    if hidden:
        where.hide(1)
    where.saved(1)
    where.make_private(world.master, keep_shown=True)
    assert bytes_at(where) == b"\x07" * NBYTES


def test_what_was_saved_of_an_older_generation_does_not_count(world: World) -> None:
    where = world.shown(writable=True)
    where.show(2, THERE)
    where.saved(1)
    where.make_private(world.master, keep_shown=True)
    assert bytes_at(where) == of_chunks(THERE)


@pytest.mark.parametrize("keep_shown", [False, True])
def test_private_bytes_are_nobody_else_s(world: World, keep_shown: bool) -> None:
    where = world.shown(writable=True)
    where.make_private(world.master, keep_shown=keep_shown)
    vm.view(where.address, 5)[:] = b"mine!"
    assert os.pread(world.master.fileno(), 5, 0) == b"\x07" * 5
    assert os.pread(world.fd.fileno(), 5, CHUNK) == b"\x65" * 5
    os.pwrite(world.fd.fileno(), b"yours", CHUNK)
    assert bytes_at(where)[:5] == b"mine!"


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK - 1, CHUNK, NBYTES])
@pytest.mark.parametrize("keep_shown", [False, True])
def test_nothing_of_the_arena_stays_mapped_once_it_is_private(
    world: World, nbytes: int, keep_shown: bool
) -> None:
    """Else one live worker would keep a dead daemon's whole arena in memory."""
    where = world.range(nbytes)
    chunks = -(-nbytes // CHUNK)
    where.show(1, ((2, chunks),) if chunks else ())
    where.make_private(world.master, keep_shown=keep_shown)
    assert not mapped_from(where, "test-arena")


@pytest.mark.parametrize("late", [None, 1, 2])
def test_a_revocation_that_comes_late_takes_no_private_bytes_away(
    world: World, late: int | None
) -> None:
    where = world.shown()
    where.make_private(world.master, keep_shown=False)
    where.hide(late)
    assert where.shown
    assert bytes_at(where) == b"\x07" * NBYTES


@pytest.mark.parametrize("shows", ["the same", "others", "what has not come"])
def test_a_grant_that_comes_late_takes_no_private_bytes_away(world: World, shows: str) -> None:
    """The client was closed meanwhile, and others use the chunks."""
    where = world.range(writable=True)
    where.show(1, HERE)
    where.make_private(world.master, keep_shown=False)
    if shows == "what has not come":
        world.files.end()
        world.files.close()
    where.show(1 if shows == "the same" else 2, THERE)
    where.lend(3, HERE)
    assert bytes_at(where) == b"\x07" * NBYTES
    assert not mapped_from(where, "test-arena")


def test_made_private_twice_it_keeps_what_was_written_since(world: World) -> None:
    where = world.range()
    where.make_private(world.master, keep_shown=False)
    vm.view(where.address, 5)[:] = b"mine!"
    where.make_private(world.master, keep_shown=False)
    assert bytes_at(where)[:5] == b"mine!"


class User:
    """Something with bytes in a range."""


def test_private_memory_that_could_not_be_freed_serves_its_next_users(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = [User(), User()]
    where, other = (Range(NBYTES, CHUNK, world.files, writable=False) for _ in range(2))
    for one, user in zip((where, other), users, strict=True):
        one.used_by([user])
        one.make_private(world.master, keep_shown=False)
    del user
    with monkeypatch.context() as patch:
        patch.setattr(vm, "unmap", lambda address, nbytes: -1)
        del users[0]
    where.used_by(again := [User()])
    users.clear()
    assert other.over
    assert not where.over
    assert bytes_at(where) == b"\x07" * NBYTES
    again.clear()
    assert where.over
