"""What is said of a read outside of a lease, before the process dies of it.

Lives here: what is said, and the table of what could be said, one row for each component.
`handler.py` says it.
"""

import ctypes
import logging
import os
import signal

from swapd.shared import vm
from swapd_client.errors import BadRequest
from swapd_client.faults.handler import ROW_BYTES, TEXT_MAX_BYTES, Handler, runs_here
from swapd_client.memory import ranges

log = logging.getLogger("swapd_client")

#: Components of a process that are explained; of more than these, those that came first.
ROWS_MAX = 16_384

#: What fits into a row, whatever there is to escape.
_NAME_MAX_CHARS = TEXT_MAX_BYTES - 128

_TAIL = (
    b": it was read or written outside of a lease, or written to though it is read-only. Wrap what "
    b"touches it: `with client.acquire(...)`, or `with attachment.use(...)` if attached. What "
    b"writes to it goes into `with attachment.edit(...)`, or it is registered with mutable=True; "
    b"what replaces weights (quantize_, share_memory_) comes before attach(), or after detach(). "
    b"`python -X faulthandler` shows the line.\n"
)
_TAIL_IN_CHILD = (
    b": this process was forked from the one that has it, and sessions and weights stay with the "
    b"parent. Connect in the child, or start it with spawn.\n"
)
#: Of a child that inherited components, and has others of its own.
_TAIL_OF_EITHER = (
    _TAIL.removesuffix(b"\n") + b" What this process had when it was forked is its parent's.\n"
)


class _Table:
    """The rows that handlers read, at an address that does not change."""

    def __init__(self) -> None:
        self.address = vm.map_anonymous(ROWS_MAX * ROW_BYTES)
        #: Rows ever used.
        self.rows = 0
        self._free: list[int] = []
        self._row_of: dict[int, int] = {}

    @property
    def in_use(self) -> bool:
        return bool(self._row_of)

    def add(self, one: ranges.Lying) -> None:
        global _tail
        row = self._row_of.get(one.start)
        if row is None:
            if one.part is None or not one.part.where.addressable:
                return  # on a GPU: the CPU cannot touch it, whatever is held
            if not self._free and self.rows == ROWS_MAX:
                return
            row = self._free.pop() if self._free else self.rows
            self._row_of[one.start] = row
        self._write(row, one.start, one.end - one.start, _text(one))
        self.rows = max(self.rows, row + 1)
        if _tail is _TAIL_IN_CHILD:
            _tail = _TAIL_OF_EITHER
        _describe()

    def remove(self, one: ranges.Lying) -> None:
        if (row := self._row_of.pop(one.start, None)) is not None:
            self._words(row)[1] = 0
            self._free.append(row)

    def _write(self, row: int, start: int, nbytes: int, text: bytes) -> None:
        """No range until all of it is there: a thread may fault meanwhile."""
        words = self._words(row)
        words[1] = 0
        ctypes.memmove(self.address + row * ROW_BYTES + 24, text, len(text))
        words[0], words[2] = start, len(text)
        words[1] = nbytes

    def _words(self, row: int) -> "ctypes.Array[ctypes.c_uint64]":
        return (ctypes.c_uint64 * 3).from_address(self.address + row * ROW_BYTES)


_table: _Table | None = None
_tail = _TAIL
_handlers: list[Handler] = []


def explain_faults() -> bool:
    """Have this process say what it did when it dies of touching a component outside of a lease.

    A segmentation fault or bus error at an address of a component (of any client of the process,
    now or later) writes one line to stderr: which component, which thread, what to do. Then the
    process dies as it would have: whatever handled the signal before does so now (`faulthandler`
    too), and the exit signal and the core are the same. Other faults are as they were. On the
    host device: on a GPU such a read is an error of CUDA.

    Costs nothing until then. Call it after what installs handlers of its own, or once more: done
    again it does nothing, unless another handler has been installed since. Returns whether faults
    are explained: not on machines that are neither x86-64 nor aarch64, nor where memory may not be
    made executable; the log says so.
    """
    global _table
    if not runs_here():
        log.warning("faults are not explained: there is no handler for this machine")
        return False
    with ranges.moving:
        if _table is None:
            _table = _Table()
            ranges.listen(_table.add, _table.remove)
        for number in (signal.SIGSEGV, signal.SIGBUS):
            if any(one.is_first for one in _handlers if one.number == number):
                continue
            try:
                _handlers.append(Handler(number, _table.address, _table.rows, _tail))
            except OSError as exc:
                log.warning("faults are not explained: %s", exc.strerror)
                return False
    return True


def explain_if(faults: str | None) -> None:
    """What `connect(faults=...)` says. Raises: BadRequest if that is nothing known."""
    if faults == "explain":
        explain_faults()
    elif faults is not None:
        raise BadRequest(f"faults={faults!r}: give 'explain', or leave it out")


def _text(one: ranges.Lying) -> bytes:
    name = ascii(one.name)
    if len(name) > _NAME_MAX_CHARS:
        name = f"{name[:_NAME_MAX_CHARS]}..."
    gone = "; close(keep=False) let go of it" if one.part is None else ""
    return f"swapd: a fault in component {name} ({one.start:#x}{gone}), thread ".encode()


def _describe() -> None:
    for one in _handlers:
        one.describe(_table.rows if _table else 0, _tail)


def _in_child() -> None:
    global _tail
    if _table is not None and _table.in_use:  # else what is there will be this process's own
        _tail = _TAIL_IN_CHILD
        _describe()


os.register_at_fork(after_in_child=_in_child)
