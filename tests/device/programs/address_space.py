"""Accesses shared memory in allowed and forbidden ways.

`python address_space.py CASE` runs the function CASE. A case that must fault runs up to its last
line, which faults.
"""

import os
import signal
import sys
from collections.abc import Callable

from swapd.shared import vm

NBYTES = 4 << 20
PATTERN = bytes(range(256)) * (NBYTES // 256)


def memory() -> int:
    """A memfd with the pattern in it."""
    fd = os.memfd_create("arena")
    os.write(fd, PATTERN)
    return fd


def content(address: int) -> bytes:
    return bytes(vm.view(address, NBYTES))


def fault(touch: Callable[[], object]) -> None:
    print("alive", flush=True)  # noqa: T201
    touch()
    print("survived")  # noqa: T201


def read(address: int) -> None:
    _ = vm.view(address, 1)[0]


def write(address: int) -> None:
    vm.view(address, 1)[0] = 1


def end_of_child(address: int) -> int:
    """The exit status of a forked child that reads at the address."""
    pid = os.fork()
    if not pid:
        try:
            read(address)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- these fault -------------------------------------------------------------------------


def read_reserved() -> None:
    at = vm.reserve(NBYTES)
    fault(lambda: read(at))


def write_reserved() -> None:
    at = vm.reserve(NBYTES)
    fault(lambda: write(at + NBYTES - 1))


def write_read_only() -> None:
    at = vm.map_shared(memory(), 0, NBYTES, writable=False)
    assert content(at) == PATTERN
    fault(lambda: write(at))


def read_shelved() -> None:
    at, shelf = vm.reserve(NBYTES), vm.reserve(NBYTES)
    vm.map_shared(memory(), 0, NBYTES, writable=True, at=at)
    assert content(at) == PATTERN
    vm.move_pages(at, shelf, NBYTES)
    vm.protect_none(at, NBYTES)
    fault(lambda: read(at + NBYTES // 2))


def write_read_only_from_the_shelf() -> None:
    at, shelf = vm.reserve(NBYTES), vm.reserve(NBYTES)
    vm.map_shared(memory(), 0, NBYTES, writable=False, at=at)
    vm.move_pages(at, shelf, NBYTES)
    vm.protect_none(at, NBYTES)
    vm.move_pages(shelf, at, NBYTES)
    assert content(at) == PATTERN
    fault(lambda: write(at))


def read_revoked() -> None:
    at = vm.map_shared(memory(), 0, NBYTES, writable=True)
    assert content(at) == PATTERN
    vm.revoke(at, NBYTES)
    fault(lambda: read(at))


# --- these end well ----------------------------------------------------------------------


def fork_with(at: int) -> None:
    assert content(at) == PATTERN
    assert end_of_child(at) == -signal.SIGSEGV
    assert content(at) == PATTERN


def fork_with_writable() -> None:
    fork_with(vm.map_shared(memory(), 0, NBYTES, writable=True))


def fork_with_read_only() -> None:
    fork_with(vm.map_shared(memory(), 0, NBYTES, writable=False, at=vm.reserve(NBYTES)))


def fork_after_the_shelf() -> None:
    at, shelf = vm.reserve(NBYTES), vm.reserve(NBYTES)
    vm.map_shared(memory(), 0, NBYTES, writable=True, at=at)
    for _ in range(2):
        vm.move_pages(at, shelf, NBYTES)
        vm.protect_none(at, NBYTES)
        assert end_of_child(shelf) == -signal.SIGSEGV
        vm.move_pages(shelf, at, NBYTES)
        assert end_of_child(at) == -signal.SIGSEGV
    vm.revoke(at, NBYTES)
    assert end_of_child(at) == -signal.SIGSEGV


def fork_with_private() -> None:
    at = vm.reserve(NBYTES)
    vm.map_private(memory(), NBYTES, at=at)
    assert end_of_child(at) == 0


def fork_with_anonymous() -> None:
    at = vm.reserve(NBYTES)
    vm.map_anonymous(NBYTES, at=at)
    assert end_of_child(at) == 0


if __name__ == "__main__":
    globals()[sys.argv[1]]()
