"""The board: one small shared page set for each session, where the daemon says what has arrived.

Each component has a slot with two 64-bit words: which generation it is and how many of its
segments are on the device; and how far it is saved. The first only ever grows, so a GPU stream
can wait for it as well as a thread can. The second is read when the daemon is gone.
Lives here: the words, and waiting for one. May not live here: what a segment is, messages.

The daemon writes progress. A failure is written by the worker's own lifeline thread, when
it is told, or when the daemon is gone: so every wait ends, and what ended it is known before.
"""

import ctypes
import errno
import fcntl
import os
import platform
from collections.abc import Iterable

from swapd.shared import vm
from swapd.shared.fds import OwnedFd
from swapd.shared.protocol import SEGMENTS_MAX

BOARD_BYTES = 64 << 10
SLOT_BYTES = 16
SLOTS = BOARD_BYTES // SLOT_BYTES
#: In the place of how many segments have arrived.
_FAILED = SEGMENTS_MAX + 1
#: Larger than the word of any residency, whatever its lower half is.
_NEVER = 1 << 62

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
#: A futex compares the lower half only: should two words ever be alike there, look again.
_LOOK_AGAIN = (ctypes.c_long * 2)(1, 0)
_EVERYBODY = (1 << 31) - 1
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_ulong),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long),
)


def word(generation: int, segments: int) -> int:
    """What stands in the slot when so many segments of this generation have arrived."""
    return generation << 16 | segments


def place(slot: int) -> int:
    """Where the first word of a slot is, in bytes from the board's begin."""
    return SLOT_BYTES * slot


class ArrivalFailed(Exception):
    """What is waited for will never arrive, in this generation."""


class Board:
    """The words of one session. Thread-safe; the memory goes with the last reference."""

    def __init__(self, fd: OwnedFd) -> None:
        """Map the board behind `fd`, which stays the caller's."""
        #: Where slot 0 is in this process.
        self.address = vm.map_shared(fd.fileno(), 0, BOARD_BYTES, writable=True)
        self._words = (ctypes.c_uint64 * (2 * SLOTS)).from_address(self.address)
        vm.free_with(self, self.address, BOARD_BYTES)

    def set(self, slot: int, value: int) -> None:
        """Raise a word to `value`, and wake who waits for it."""
        self._words[2 * slot] = value
        at = self.address + place(slot)
        _syscall(_SYS_FUTEX, at, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def fail(self, slot: int, generation: int) -> None:
        """This generation will never be complete: end every wait for it."""
        self.set(slot, max(self._words[2 * slot], word(generation, _FAILED)))

    def fail_all(self, slots: Iterable[int]) -> None:
        """Nothing will arrive any more in these slots."""
        for slot in slots:
            # the half that is compared must change, or who is about to sleep would not notice
            self.set(slot, _NEVER | ~self._words[2 * slot] & 0xFFFFFFFF)

    def has(self, slot: int, target: int) -> bool:
        """Whether a word has reached `target`. Raises: ArrivalFailed."""
        value = self._words[2 * slot]
        if value < target:
            return False
        if value >> 16 != target >> 16 or value & _FAILED == _FAILED:
            raise ArrivalFailed
        return True

    def wait(self, slot: int, target: int) -> None:
        """Block until a word has reached `target`. Raises: ArrivalFailed."""
        while not self.has(slot, target):
            seen = self._words[2 * slot]
            if seen < target:
                low = seen & 0xFFFFFFFF  # the half that changes; little-endian, so it is first
                at = self.address + place(slot)
                failed = _syscall(_SYS_FUTEX, at, _FUTEX_WAIT, low, _LOOK_AGAIN, None, 0)
                code = ctypes.get_errno() if failed else 0
                if code not in (0, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                    raise OSError(code, os.strerror(code))

    def set_saved(self, slot: int, generation: int, chunks: int) -> None:
        """So many chunks of this generation are in the master, and may be overwritten."""
        self._words[2 * slot + 1] = generation << 24 | chunks

    def saved(self, slot: int, generation: int) -> int:
        """How many chunks of this generation are in the master, and perhaps nowhere else."""
        value = self._words[2 * slot + 1]
        return value & 0xFFFFFF if value >> 24 == generation else 0


class Boards:
    """The daemon's side of one session's board: who has which slot."""

    def __init__(self) -> None:
        self.fd = OwnedFd(os.memfd_create("swapd-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(self.fd.fileno(), BOARD_BYTES)
        # a worker that could shrink it could kill the daemon, which writes there
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd.fileno(), fcntl.F_ADD_SEALS, seals)
        self.board = Board(self.fd)
        self._free = list(range(SLOTS - 1, -1, -1))

    def take(self) -> int:
        """A slot that is nobody's. Raises: IndexError when all are taken."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Its word stays: generations only grow, so the next owner's words are larger."""
        self._free.append(slot)

    def close(self) -> None:
        """Close the descriptor. Who still writes keeps the memory."""
        self.fd.close()


class Progress:
    """Writes how far a component's copies are into its slot, in any thread."""

    def __init__(self, boards: Boards, ends: tuple[int, ...]) -> None:
        """Take a slot, until `close`. `ends`: where each segment ends, in bytes, ascending.

        Raises: IndexError when all slots are taken.
        """
        self._boards = boards
        self._users = 1
        self.slot = boards.take()
        self._ends = ends

    def landed(self, generation: int, nbytes: int) -> None:
        """The first `nbytes` bytes of this generation are on the device."""
        arrived = sum(1 for end in self._ends if end <= nbytes)
        self._boards.board.set(self.slot, word(generation, arrived))

    def saved(self, generation: int, chunks: int) -> None:
        """The first `chunks` chunks of this generation are in the master."""
        self._boards.board.set_saved(self.slot, generation, chunks)

    def share(self) -> "Progress":
        """The same for a second master of its component; each is closed."""
        self._users += 1
        return self

    def close(self) -> None:
        """One master of the component is gone, and no copy of it is in flight."""
        self._users -= 1
        if not self._users:
            self._boards.give(self.slot)
