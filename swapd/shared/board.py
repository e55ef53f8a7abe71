"""The board: shared pages on which the daemon shows progress to a session.

Each component has a slot of 64-bit words: its generation with the number of segments on the device,
its generation with the number of chunks there, and the generation last saved to the host copy. The
first two only grow, so a GPU stream or a thread can wait for them. A worker reads the third when
the daemon is gone. One more word says that the daemon has ended the session: a worker checks it
after every step, and cannot afford a system call for that.

The daemon writes progress. The worker's own lifeline thread writes a failure when the daemon
reports it or is gone, so every wait ends.
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
ARRIVED, LANDED, _SAVED = range(3)
#: The fourth word of slot 0: 1 once the session has ended, before others use its memory.
_ENDED = 3
#: Bits of the count in the first two words. The generation is above them.
_BITS = (16, 24)
#: A count that means failure: larger than any real one.
_FAILED = tuple((1 << bits) - 1 for bits in _BITS)
#: Larger than the word of any residency, whatever the lower half.
_NEVER = 1 << 62

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
#: A futex compares only the lower half of a word, so look again in case two words agree there.
_LOOK_AGAIN = (ctypes.c_long * 2)(1, 0)
_EVERYBODY = (1 << 31) - 1
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_ulong),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long),
)


def word(generation: int, count: int, which: int = ARRIVED) -> int:
    """Return the word for this number of arrived segments, or landed chunks."""
    return generation << _BITS[which] | count


def place(slot: int) -> int:
    return SLOT_BYTES * slot


class ArrivalFailed(Exception):
    """The awaited segments will never arrive in this generation."""


class Board:
    """The words of one session. Thread-safe; the last reference unmaps the memory."""

    def __init__(self, fd: OwnedFd) -> None:
        """The caller keeps `fd`."""
        self.address = vm.map_shared(fd.fileno(), 0, BOARD_BYTES, writable=True)
        self._words = (ctypes.c_uint64 * (_WORDS * SLOTS)).from_address(self.address)
        vm.free_with(self, self.address, BOARD_BYTES)

    def set(self, slot: int, value: int, which: int = ARRIVED) -> None:
        """Raise a word to `value`, and wake its waiters."""
        index = _WORDS * slot + which
        if self._words[index] != value:
            self._words[index] = value
            self._wake(index)

    def wake(self, slot: int) -> None:
        """Have the waiters of this slot check their `unless` again."""
        for which in (ARRIVED, LANDED):
            self._wake(_WORDS * slot + which)

    def _wake(self, index: int) -> None:
        _syscall(_SYS_FUTEX, self.address + 8 * index, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def fail(self, slot: int, generation: int) -> None:
        """End every wait for this generation, which will never be complete."""
        for which in (ARRIVED, LANDED):
            now = self._words[_WORDS * slot + which]
            self.set(slot, max(now, word(generation, _FAILED[which], which)), which)

    def fail_all(self, slots: Iterable[int]) -> None:
        """End every wait in these slots: nothing will arrive any more."""
        for slot in slots:
            for which in (ARRIVED, LANDED):
                # Change the half that the futex compares; a thread about to sleep would miss any
                # other change.
                now = self._words[_WORDS * slot + which]
                self.set(slot, _NEVER | ~now & 0xFFFFFFFF, which)

    def has(self, slot: int, target: int, which: int = ARRIVED) -> bool:
        """Return whether a word has reached `target`. Raises: ArrivalFailed."""
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
        """Block until a word has reached `target`.

        Returns False once the monotonic clock reaches `until`, or `unless` is true (see `wake`).
        Raises: ArrivalFailed.
        """
        index = _WORDS * slot + which
        while not self.has(slot, target, which):
            left = until - time.monotonic()
            if left <= 0 or unless():
                return False
            seen = self._words[index]
            if seen < target:
                low = seen & 0xFFFFFFFF  # the half that changes; first, in little-endian
                again = _LOOK_AGAIN if left >= 1 else (ctypes.c_long * 2)(0, int(left * 1e9))
                at = self.address + 8 * index
                failed = _syscall(_SYS_FUTEX, at, _FUTEX_WAIT, low, again, None, 0)
                code = ctypes.get_errno() if failed else 0
                if code not in (0, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                    raise OSError(code, os.strerror(code))
        return True

    def set_saved(self, slot: int, generation: int) -> None:
        """Note that the host copy has the bytes of this generation: its chunks may be
        overwritten."""
        self._words[_WORDS * slot + _SAVED] = generation

    def is_saved(self, slot: int, generation: int) -> bool:
        """Return whether the host copy has the bytes of this generation, perhaps as the only
        place."""
        return self._words[_WORDS * slot + _SAVED] == generation

    def end(self) -> None:
        """Note that the session has ended. Call this before others may use its memory."""
        self._words[_ENDED] = 1

    @property
    def ended(self) -> bool:
        """Whether the daemon has ended the session, even if its message is still unread here."""
        return self._words[_ENDED] != 0


class Boards:
    """The daemon's side of one session's board. It assigns the slots."""

    def __init__(self) -> None:
        self.fd = OwnedFd(os.memfd_create("swapd-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(self.fd.fileno(), BOARD_BYTES)
        # Seal it: a worker that shrank it would kill the daemon at its next write.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd.fileno(), fcntl.F_ADD_SEALS, seals)
        self.board = Board(self.fd)
        self._free = list(range(SLOTS - 1, -1, -1))

    def take(self) -> int:
        """Raises: IndexError if no slot is free."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Free a slot. Its words stay, as the next owner's generations are larger."""
        self._free.append(slot)

    def close(self) -> None:
        """End the session on the board. Threads that still write keep the memory mapped."""
        self.board.end()
        self.fd.close()


class LoadProgress:
    """Writes the progress of a component's copies into its slot. Thread-safe."""

    def __init__(self, boards: Boards, ends: tuple[int, ...], nbytes: int, chunk: int) -> None:
        """Take a slot, until `close`. `ends`: the ascending end of each segment, in bytes;
        `nbytes`, `chunk`: the sizes of the component and of its chunks.

        Raises: IndexError if no slot is free.
        """
        self._boards = boards
        self._users = 1
        self.slot = boards.take()
        self._ends = ends
        self._nbytes = nbytes
        self._chunk = chunk

    def landed(self, generation: int, nbytes: int) -> None:
        """Note that the first `nbytes` bytes are on the device."""
        whole = nbytes if nbytes < self._nbytes else nbytes + self._chunk - 1
        landed = word(generation, whole // self._chunk, LANDED)
        self._boards.board.set(self.slot, landed, LANDED)
        arrived = sum(1 for end in self._ends if end <= nbytes)
        self._boards.board.set(self.slot, word(generation, arrived))

    def saved(self, generation: int) -> None:
        self._boards.board.set_saved(self.slot, generation)

    def share(self) -> "LoadProgress":
        """Share the slot with a second host copy of the component. Each closes it once."""
        self._users += 1
        return self

    def close(self) -> None:
        """End one host copy's use. None of its copies may be in flight."""
        self._users -= 1
        if not self._users:
            self._boards.give(self.slot)
