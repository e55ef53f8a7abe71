"""A component's range in a process of its own: `python mapped_range.py CASE` runs function CASE."""

import os
import signal
import sys

from swapd.shared import protocol, vm
from swapd.shared.fds import OwnedFd, reopen_read_only
from swapd_client.memory.mapping import Range
from swapd_client.session.life import Files

CHUNK, CHUNKS = 2 << 20, 8
NBYTES = 2 * CHUNK + 5000


class World:
    """An arena full of "x", a host copy full of "m", and a read-only range."""

    def __init__(self) -> None:
        self.arena = OwnedFd(os.memfd_create("arena"))
        os.write(self.arena.fileno(), b"x" * CHUNKS * CHUNK)
        self.reader = reopen_read_only(self.arena.fileno())
        self.master = OwnedFd(os.memfd_create("master"))
        os.write(self.master.fileno(), b"m" * NBYTES)
        files = Files(CHUNKS)
        files.add(protocol.Files((0,)), [self.reader])
        self.where = Range(NBYTES, CHUNK, files, writable=False)

    def touch(self, at: int = 0) -> int:
        return vm.view(self.where.address + at, 1)[0]

    def write(self) -> None:
        vm.view(self.where.address, 1)[0] = 1

    def end_of_child(self) -> int:
        """The exit code of a forked child that reads the first byte: 0 if it is the host copy's."""
        pid = os.fork()
        if not pid:
            os._exit(0 if self.touch() == ord("m") else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- the last line of each of these faults ------------------------------------------------


def new() -> None:
    World().touch()


def hidden() -> None:
    world = World()
    world.where.show(1, ((0, 3),))
    world.touch()
    world.where.hide(1)
    world.touch(2 * CHUNK)


def hidden_in_runs() -> None:
    world = World()
    world.where.show(1, ((0, 1), (4, 2)))
    world.where.hide()
    world.touch(CHUNK)


def hidden_again() -> None:
    world = World()
    for lease in (1, 2):
        world.where.show(lease, ((0, 3),))
        world.where.hide(lease)
    world.touch()


def written() -> None:
    world = World()
    world.where.show(1, ((0, 3),))
    world.write()


def written_when_back() -> None:
    world = World()
    world.where.show(1, ((0, 3),))
    world.where.hide()
    world.where.show(2, ((0, 3),))
    world.write()


# --- this one ends well ------------------------------------------------------------------


def fork() -> None:
    world = World()
    world.where.show(1, ((0, 3),))
    assert world.end_of_child() == -signal.SIGSEGV
    world.where.make_private(world.master, keep_shown=False)
    assert world.end_of_child() == 0
    for fd in (world.arena, world.reader, world.master):
        fd.close()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
