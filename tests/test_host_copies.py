"""Host copies: of exactly the requested size, fully allocated, sealed, safe from other writers."""

import errno
import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from swapd.daemon import host_copies as module
from swapd.daemon.host_copies import HostCopies, HostCopyError, T, Work
from swapd.device import DeviceError
from swapd.shared import vm
from swapd.shared.fds import OwnedFd
from tests.processes import output_of

MIB = 1 << 20
NBYTES = 3 * MIB + 12345
SPAN = vm.round_up(NBYTES)


class Unpinnable:
    """The part of a device that host copies need."""

    read_only_pins = True

    def pin(self, address: int, nbytes: int, *, writable: bool) -> None:
        raise DeviceError("not today")

    def unpin(self, address: int) -> None:
        pass

    def pinned(self) -> None:
        return None


def done(work: Work[T]) -> T:
    """All of the work at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


class Copies(HostCopies):
    """Host copies that are made, sealed and dropped at once."""

    def __init__(self, limit_bytes: int | None, device: Any) -> None:
        super().__init__(limit_bytes, device)

    def made(self, uid: int, nbytes: int, *, mutable: bool) -> int:
        return done(self.make(uid, nbytes, mutable=mutable))

    def sealed(self, uid: int) -> None:
        done(self.seal(uid))

    def dropped(self, uid: int) -> None:
        self.announce_drop()
        self.drop(uid)

    def close(self) -> None:
        for uid in list(self._copies):
            self.dropped(uid)
        self._pinner.shutdown()


@pytest.fixture
def copies() -> Iterator[Copies]:
    made = Copies(None, Unpinnable())
    yield made
    made.close()
    assert len(made) == made.total_bytes == made.to_pin_bytes == 0


def snapshot() -> tuple[list[str], int]:
    """Descriptors of this process, and the number of host copies mapped in it."""
    mapped = Path("/proc/self/maps").read_text().count("memfd:swapd-host-copy")
    return sorted(os.listdir("/proc/self/fd")), mapped


def mapping_of(address: int) -> str:
    """The mode of the mapping that begins at `address`, as in `r--s`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{address:x}-")]
    return line.split()[1]


def fill(fd: int, content: bytes) -> None:
    """Like a worker: through a mapping, which is gone before the commit."""
    span = vm.round_up(len(content))
    at = vm.map_shared(fd, 0, span, writable=True)
    vm.view(at, len(content))[:] = content
    vm.free(at, span)


CONTENT = (bytes(i * i % 251 for i in range(251)) * (NBYTES // 251 + 1))[:NBYTES]


# --- taken over --------------------------------------------------------------------------


@pytest.mark.parametrize("allocated", [NBYTES, NBYTES - 2 * vm.PAGE_BYTES, 0])
def test_what_has_no_memory_is_no_host_copy_to_take_over(copies: Copies, allocated: int) -> None:
    """The daemon would get it, and it might be more than the machine has."""
    with OwnedFd(os.memfd_create("handed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) as fd:
        os.ftruncate(fd.fileno(), NBYTES)
        if allocated:
            os.posix_fallocate(fd.fileno(), 0, allocated)
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert copies.is_adoptable(fd.fileno(), NBYTES) == (allocated == NBYTES)


# --- make --------------------------------------------------------------------------------


def test_a_host_copy_is_exactly_as_large_as_asked_and_allocated_in_full(copies: Copies) -> None:
    fd = copies.made(1, NBYTES, mutable=False)
    found = os.fstat(fd)
    assert found.st_size == NBYTES
    assert found.st_blocks * 512 >= NBYTES
    assert (len(copies), copies.total_bytes) == (1, NBYTES)
    assert not os.get_inheritable(fd)


def test_nobody_can_resize_a_host_copy(copies: Copies) -> None:
    fd = copies.made(1, NBYTES, mutable=True)
    for nbytes in (0, NBYTES - 1, NBYTES + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
    assert os.fstat(fd).st_size == NBYTES


def test_a_host_copy_of_no_bytes_needs_no_mapping(copies: Copies) -> None:
    copies.made(1, 0, mutable=False)
    copies.sealed(1)
    assert copies.address(1) == 0


# --- seal --------------------------------------------------------------------------------


@pytest.mark.parametrize("mutable", [False, True])
def test_a_sealed_host_copy_has_the_worker_s_bytes_at_its_address(
    copies: Copies, mutable: bool
) -> None:
    fd = copies.made(1, NBYTES, mutable=mutable)
    fill(fd, CONTENT)
    copies.sealed(1)
    assert bytes(vm.view(copies.address(1), NBYTES)) == CONTENT
    assert mapping_of(copies.address(1)) == ("rw-s" if mutable else "r--s")


def test_a_clean_host_copy_can_never_be_written_again(copies: Copies) -> None:
    fd = copies.made(1, NBYTES, mutable=False)
    fill(fd, CONTENT)
    copies.sealed(1)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        vm.map_shared(fd, 0, SPAN, writable=True)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    assert os.pread(fd, NBYTES, 0) == CONTENT


def test_a_clean_host_copy_is_mapped_writable_where_it_could_not_be_pinned_otherwise() -> None:
    pinned: list[tuple[int, int, bool]] = []

    class Picky(Unpinnable):
        read_only_pins = False

        def pin(self, address: int, nbytes: int, *, writable: bool) -> None:
            pinned.append((address, nbytes, writable))

    copies = Copies(None, Picky())
    fd = copies.made(1, NBYTES, mutable=False)
    fill(fd, content := bytes(range(256)) * (NBYTES // 256) + bytes(NBYTES % 256))
    copies.sealed(1)
    address = copies.address(1)
    assert mapping_of(address) == "rw-s"
    assert bytes(vm.view(address, NBYTES)) == content
    with pytest.raises(PermissionError):
        vm.map_shared(fd, 0, SPAN, writable=True)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    copies._pinner.submit(int).result()  # after the pin, which a close would skip
    copies.close()
    assert pinned == [(address, NBYTES, True)]


def test_a_clean_host_copy_can_still_become_private_memory(copies: Copies) -> None:
    """As in a worker whose session ends: copy-on-write, from the descriptor that it kept."""
    fd = copies.made(1, NBYTES, mutable=False)
    fill(fd, CONTENT)
    copies.sealed(1)
    at = vm.reserve(SPAN)
    vm.map_private(fd, SPAN, at=at)
    vm.view(at, 1)[0] = 255
    assert bytes(vm.view(at, NBYTES)) == b"\xff" + CONTENT[1:]
    assert bytes(vm.view(copies.address(1), NBYTES)) == CONTENT
    vm.free(at, SPAN)


def test_a_worker_that_keeps_its_writable_mapping_gets_bad_request(copies: Copies) -> None:
    fd = copies.made(1, NBYTES, mutable=False)
    kept = vm.map_shared(fd, 0, SPAN, writable=True)
    with pytest.raises(HostCopyError, match="mapped for writing") as refused:
        copies.sealed(1)
    assert refused.value.code == "bad_request"
    assert copies.address(1) == 0
    vm.free(kept, SPAN)
    copies.sealed(1)
    assert copies.address(1)


def test_a_host_copy_that_seems_to_be_mapped_for_a_moment_is_sealed_then(copies: Copies) -> None:
    fd = copies.made(1, NBYTES, mutable=False)
    kept = vm.map_shared(fd, 0, SPAN, writable=True)
    sealing = copies.seal(1)
    next(sealing)
    assert copies.address(1) == 0
    vm.free(kept, SPAN)
    done(sealing)
    assert copies.address(1)


@pytest.mark.parametrize(
    ("mutable", "seals", "read_only_pins"),
    [
        (False, fcntl.F_SEAL_SEAL, True),
        (False, fcntl.F_SEAL_SEAL, False),
        (True, fcntl.F_SEAL_WRITE, True),
    ],
    ids=["clean", "clean, and mapped writable", "mutable"],
)
def test_a_worker_that_seals_its_host_copy_itself_gets_bad_request(
    copies: Copies,
    mutable: bool,
    seals: int,
    read_only_pins: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Unpinnable, "read_only_pins", read_only_pins)
    fd = copies.made(1, NBYTES, mutable=mutable)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(HostCopyError, match="the worker has sealed it") as refused:
        copies.sealed(1)
    assert refused.value.code == "bad_request"


def test_a_worker_that_shuts_its_host_copy_gets_bad_request() -> None:
    output_of(Path(__file__).parent / "programs" / "shut_host_copy.py")


def test_a_host_copy_that_cannot_be_mapped_is_refused_and_can_be_dropped(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot()
    copies.made(1, NBYTES, mutable=False)
    with monkeypatch.context() as patch:
        patch.setattr(vm, "populate", refuse_with(errno.ENOMEM))
        with pytest.raises(HostCopyError, match="Cannot allocate memory") as refused:
            copies.sealed(1)
    assert refused.value.code == "host_memory"
    copies.dropped(1)
    assert snapshot() == before


# --- room --------------------------------------------------------------------------------


def refuse_with(number: int) -> Any:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return refuse


def refused(copies: Copies, nbytes: int, code: str = "host_memory") -> str:
    """The reason why a host copy of `nbytes` cannot be made; checks that nothing is left of it."""
    before = snapshot(), len(copies), copies.total_bytes
    with pytest.raises(HostCopyError) as failed:
        copies.made(99, nbytes, mutable=False)
    assert failed.value.code == code
    assert (snapshot(), len(copies), copies.total_bytes) == before
    copies.dropped(99)  # the core orders this for every failed host copy
    assert (snapshot(), len(copies), copies.total_bytes) == before
    return str(failed.value)


def test_host_copies_together_keep_to_the_limit() -> None:
    copies = Copies(10 * MIB, Unpinnable())
    copies.made(1, 6 * MIB, mutable=False)
    why = refused(copies, 5 * MIB)
    assert "a host copy of 5 MiB" in why
    assert "host copies hold 6 MiB (limit 10 MiB)" in why
    assert "--host-memory" in why
    copies.made(2, 4 * MIB, mutable=False)
    refused(copies, 1)
    copies.dropped(1)
    copies.made(3, 6 * MIB, mutable=True)
    copies.close()


def test_without_a_limit_the_host_s_memory_is_the_limit(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "limit none" in refused(copies, 1 << 50)
    monkeypatch.setattr(module, "available_bytes", lambda: module.RESERVE_BYTES + 2 * MIB)
    assert "66 MiB are available" in refused(copies, 2 * MIB + 1)
    copies.made(1, 2 * MIB, mutable=False)


@pytest.mark.parametrize(
    ("verb", "number", "code", "why"),
    [
        ("posix_fallocate", errno.ENOSPC, "host_memory", os.strerror(errno.ENOSPC)),
        ("memfd_create", errno.EMFILE, "limit", "ulimit -n"),
        ("memfd_create", errno.ENFILE, "host_memory", os.strerror(errno.ENFILE)),
    ],
)
def test_a_system_that_has_no_room_refuses_the_host_copy_and_no_more(
    copies: Copies,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    number: int,
    code: str,
    why: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, verb, refuse_with(number))
        assert why in refused(copies, NBYTES, code)
    copies.made(99, NBYTES, mutable=False)


def test_what_is_being_made_when_the_daemon_stops_is_given_up(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_BYTES", MIB)
    descriptors = len(os.listdir("/proc/self/fd"))
    making = copies.make(7, 3 * MIB, mutable=False)
    next(making)
    assert copies.total_bytes == 3 * MIB
    making.close()
    assert copies.total_bytes == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors


def nobody_says() -> NoReturn:
    raise DeviceError("nobody says")


def test_where_nobody_says_how_much_memory_there_is_the_host_copy_is_refused(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "available_bytes", nobody_says)
        assert "nobody says" in refused(copies, NBYTES, "limit")
    copies.made(99, NBYTES, mutable=False)


# --- drop --------------------------------------------------------------------------------


@pytest.mark.parametrize("mutable", [False, True])
def test_drop_leaves_no_mapping_and_no_descriptor(copies: Copies, mutable: bool) -> None:
    before = snapshot()
    copies.made(1, NBYTES, mutable=mutable)
    copies.made(2, NBYTES, mutable=mutable)
    copies.sealed(1)
    for uid in (1, 2):
        copies.dropped(uid)
        copies.dropped(uid)
    assert snapshot() == before
    assert copies.total_bytes == 0


# --- shared by content -------------------------------------------------------------------


def test_a_shared_host_copy_is_counted_once_and_dropped_with_the_last(copies: Copies) -> None:
    fd = copies.made(1, NBYTES, mutable=False)
    fill(fd, CONTENT)
    copies.sealed(1)
    assert copies.share(2, 1) == fd
    copies.sealed(2)
    assert copies.total_bytes == NBYTES
    assert copies.address(2) == copies.address(1)
    copies.dropped(1)
    assert copies.total_bytes == NBYTES
    assert bytes(vm.view(copies.address(2), NBYTES)) == CONTENT
    copies.dropped(2)
    assert copies.total_bytes == 0


def test_host_copies_leave_little_that_a_collection_of_garbage_looks_at() -> None:
    """The loop waits for each collection: with 10,000 host copies one would take a tenth of a
    second.
    """

    class Pinnable(Unpinnable):
        def pin(self, address: int, nbytes: int, *, writable: bool) -> None:
            pass

    copies = Copies(None, Pinnable())
    count = 200
    gc.collect()
    before = len(gc.get_objects())
    for uid in range(count):
        copies.made(uid, 4096, mutable=False)
        copies.sealed(uid)
    copies._pinner.submit(int).result()  # after all pins
    gc.collect()
    looked_at = len(gc.get_objects()) - before
    copies.close()
    assert looked_at < 4 * count
