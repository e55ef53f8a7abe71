"""The board: one small shared page set for each session, where the daemon says what has arrived.

Each component has a slot with three 64-bit words: which generation it is and how many of its
segments are on the device; how many of its chunks; and how far it is saved. The first two only
ever grow, so a GPU stream can wait for them as well as a thread can. The last is read when the
daemon is gone.
Lives here: the words, and waiting for one. May not live here: what a segment is, messages.

The daemon writes progress. A failure is written by the worker's own lifeline thread, when
it is told, or when the daemon is gone: so every wait ends, and what ended it is known before.
"""

import ctypes
import errno
import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterable
from math import inf

from swapd.shared import vm
from swapd.shared.fds import OwnedFd

BOARD_BYTES = 128 << 10
SLOT_BYTES = 32
SLOTS = BOARD_BYTES // SLOT_BYTES
_WORDS = SLOT_BYTES // 8
#: The words of a slot: segments that have arrived, chunks that have, chunks that are saved.
ARRIVED, LANDED, _SAVED = range(3)
#: The lower bits of each word have how many; the others the generation.
_BITS = (16, 24, 24)
#: In the place of how many have arrived: more than there are of anything.
_FAILED = tuple((1 << bits) - 1 for bits in _BITS)
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


def word(generation: int, count: int, which: int = ARRIVED) -> int:
    """What a word is when so many segments, or chunks, of this generation have arrived."""
    return generation << _BITS[which] | count


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
        self._words = (ctypes.c_uint64 * (_WORDS * SLOTS)).from_address(self.address)
        vm.free_with(self, self.address, BOARD_BYTES)

    def set(self, slot: int, value: int, which: int = ARRIVED) -> None:
        """Raise a word to `value`, and wake who waits for it."""
        index = _WORDS * slot + which
        if self._words[index] != value:
            self._words[index] = value
            self._wake(index)

    def wake(self, slot: int) -> None:
        """Have those that wait there look whether they still want to."""
        for which in (ARRIVED, LANDED):
            self._wake(_WORDS * slot + which)

    def _wake(self, index: int) -> None:
        _syscall(_SYS_FUTEX, self.address + 8 * index, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def fail(self, slot: int, generation: int) -> None:
        """This generation will never be complete: end every wait for it."""
        for which in (ARRIVED, LANDED):
            now = self._words[_WORDS * slot + which]
            self.set(slot, max(now, word(generation, _FAILED[which], which)), which)

    def fail_all(self, slots: Iterable[int]) -> None:
        """Nothing will arrive any more in these slots."""
        for slot in slots:
            for which in (ARRIVED, LANDED):
                # the half that is compared must change, or who is about to sleep would not notice
                now = self._words[_WORDS * slot + which]
                self.set(slot, _NEVER | ~now & 0xFFFFFFFF, which)

    def has(self, slot: int, target: int, which: int = ARRIVED) -> bool:
        """Whether a word has reached `target`. Raises: ArrivalFailed."""
        value = self._words[_WORDS * slot + which]
        if value < target:
            return False
        bits, failed = _BITS[which], _FAILED[which]
        if value >> bits != target >> bits or value & failed == failed:
            raise ArrivalFailed
        return True

    def wait(
        self,
        slot: int,
        target: int,
        which: int = ARRIVED,
        *,
        until: float = inf,
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Block until a word has reached `target`; False if it is `until` before, on the monotonic
        clock, or `unless` has come true, see `wake`. Raises: ArrivalFailed."""
        index = _WORDS * slot + which
        while not self.has(slot, target, which):
            left = until - time.monotonic()
            if left <= 0 or unless():
                return False
            seen = self._words[index]
            if seen < target:
                low = seen & 0xFFFFFFFF  # the half that changes; little-endian, so it is first
                again = _LOOK_AGAIN if left >= 1 else (ctypes.c_long * 2)(0, int(left * 1e9))
                at = self.address + 8 * index
                failed = _syscall(_SYS_FUTEX, at, _FUTEX_WAIT, low, again, None, 0)
                code = ctypes.get_errno() if failed else 0
                if code not in (0, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                    raise OSError(code, os.strerror(code))
        return True

    def set_saved(self, slot: int, generation: int, chunks: int) -> None:
        """So many chunks of this generation are in the master, and may be overwritten."""
        self._words[_WORDS * slot + _SAVED] = word(generation, chunks, _SAVED)

    def saved(self, slot: int, generation: int) -> int:
        """How many chunks of this generation are in the master, and perhaps nowhere else."""
        value = self._words[_WORDS * slot + _SAVED]
        return value & _FAILED[_SAVED] if value >> _BITS[_SAVED] == generation else 0


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

    def __init__(self, boards: Boards, ends: tuple[int, ...], nbytes: int, chunk: int) -> None:
        """Take a slot, until `close`. `ends`: where each segment ends, in bytes, ascending, of
        `nbytes` in chunks of `chunk`.

        Raises: IndexError when all slots are taken.
        """
        self._boards = boards
        self._users = 1
        self.slot = boards.take()
        self._ends = ends
        self._nbytes = nbytes
        self._chunk = chunk

    def landed(self, generation: int, nbytes: int) -> None:
        """The first `nbytes` bytes of this generation are on the device."""
        whole = nbytes if nbytes < self._nbytes else nbytes + self._chunk - 1
        landed = word(generation, whole // self._chunk, LANDED)
        self._boards.board.set(self.slot, landed, LANDED)
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
