"""The board: a small page set that the daemon shares with a session, and where it shows progress.

Each component has a slot of three 64-bit words: its generation with the number of segments on the
device; with the number of chunks there; and the generation that was last saved to the host copy.
The first two only ever grow, so both a GPU stream and a thread can wait for them. A worker reads
the third when the daemon is gone. Another word tells that the daemon has ended the session, because
a worker that asks after every step cannot afford a system call.
Lives here: the words, and waiting for one. May not live here: the meaning of segments, messages.

The daemon writes progress. The worker's own lifeline thread writes a failure, when the daemon
reports it or is gone: so every wait ends, and its end has a known cause.
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
#: The words of a slot: arrived segments, landed chunks, the saved generation.
ARRIVED, LANDED, _SAVED = range(3)
#: The fourth word of slot 0: 1 once the session has ended, before its memory is used for others.
_ENDED = 3
#: Width of the count in each of the first two: its lower bits; the others are the generation.
_BITS = (16, 24)
#: A count that means failure: larger than any real one.
_FAILED = tuple((1 << bits) - 1 for bits in _BITS)
#: Larger than the word of any residency, with any lower half.
_NEVER = 1 << 62

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
#: A futex compares the lower half only. If two words are ever alike there, look again.
_LOOK_AGAIN = (ctypes.c_long * 2)(1, 0)
_EVERYBODY = (1 << 31) - 1
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_ulong),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long),
)


def word(generation: int, count: int, which: int = ARRIVED) -> int:
    """The value of a word when so many segments, or chunks, of this generation have arrived."""
    return generation << _BITS[which] | count


def place(slot: int) -> int:
    """Offset of a slot's first word on the board, in bytes."""
    return SLOT_BYTES * slot


class ArrivalFailed(Exception):
    """The awaited segments will never arrive in this generation."""


class Board:
    """The words of one session. Thread-safe; the last reference unmaps the memory."""

    def __init__(self, fd: OwnedFd) -> None:
        """Map the board behind `fd`, which the caller keeps."""
        #: Address of slot 0 in this process.
        self.address = vm.map_shared(fd.fileno(), 0, BOARD_BYTES, writable=True)
        self._words = (ctypes.c_uint64 * (_WORDS * SLOTS)).from_address(self.address)
        vm.free_with(self, self.address, BOARD_BYTES)

    def set(self, slot: int, value: int, which: int = ARRIVED) -> None:
        """Raise a word to `value`, and wake the threads that wait for it."""
        index = _WORDS * slot + which
        if self._words[index] != value:
            self._words[index] = value
            self._wake(index)

    def wake(self, slot: int) -> None:
        """Have the threads that wait there check their `unless` again."""
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
        """End every wait in these slots: nothing will arrive any more."""
        for slot in slots:
            for which in (ARRIVED, LANDED):
                # change the half that the futex compares, or a thread about to sleep would miss it
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
        """Block until a word has reached `target`. False if the monotonic clock reaches `until`
        first, or `unless` has become true, see `wake`. Raises: ArrivalFailed."""
        index = _WORDS * slot + which
        while not self.has(slot, target, which):
            left = until - time.monotonic()
            if left <= 0 or unless():
                return False
            seen = self._words[index]
            if seen < target:
                low = seen & 0xFFFFFFFF  # the half that changes; it is first, in little-endian
                again = _LOOK_AGAIN if left >= 1 else (ctypes.c_long * 2)(0, int(left * 1e9))
                at = self.address + 8 * index
                failed = _syscall(_SYS_FUTEX, at, _FUTEX_WAIT, low, again, None, 0)
                code = ctypes.get_errno() if failed else 0
                if code not in (0, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                    raise OSError(code, os.strerror(code))
        return True

    def set_saved(self, slot: int, generation: int) -> None:
        """The host copy has the bytes of this generation, whose chunks may be overwritten."""
        self._words[_WORDS * slot + _SAVED] = generation

    def is_saved(self, slot: int, generation: int) -> bool:
        """Whether the bytes of this generation are in the host copy, and perhaps nowhere else."""
        return self._words[_WORDS * slot + _SAVED] == generation

    def end(self) -> None:
        """The session has ended. Call it before others may use its memory."""
        self._words[_ENDED] = 1

    @property
    def ended(self) -> bool:
        """Whether the daemon has ended the session, perhaps before this process has read of it."""
        return self._words[_ENDED] != 0


class Boards:
    """The daemon's side of one session's board: it assigns the slots."""

    def __init__(self) -> None:
        self.fd = OwnedFd(os.memfd_create("swapd-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(self.fd.fileno(), BOARD_BYTES)
        # a worker that shrank it would kill the daemon at its next write
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd.fileno(), fcntl.F_ADD_SEALS, seals)
        self.board = Board(self.fd)
        self._free = list(range(SLOTS - 1, -1, -1))

    def take(self) -> int:
        """A free slot. Raises: IndexError if there is none."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Free a slot. Its word stays: generations only grow, so the next owner's are larger."""
        self._free.append(slot)

    def close(self) -> None:
        """End the session there, and close the descriptor. Threads that still write keep the
        memory.
        """
        self.board.end()
        self.fd.close()


class LoadProgress:
    """Writes the progress of a component's copies into its slot, in any thread."""

    def __init__(self, boards: Boards, ends: tuple[int, ...], nbytes: int, chunk: int) -> None:
        """Take a slot, until `close`. `ends`: the ascending end of each segment, in bytes; `nbytes`
        is the component's size, and `chunk` that of its chunks.

        Raises: IndexError if no slot is free.
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

    def saved(self, generation: int) -> None:
        """The host copy has the bytes of this generation."""
        self._boards.board.set_saved(self.slot, generation)

    def share(self) -> "LoadProgress":
        """Share it with a second host copy of the component; close it once for each."""
        self._users += 1
        return self

    def close(self) -> None:
        """End one host copy's use. No copy of it may be in flight."""
        self._users -= 1
        if not self._users:
            self._boards.give(self.slot)
