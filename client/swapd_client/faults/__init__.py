"""Explains an access outside of a lease before the process dies of it.

A table has a message for each component; `handler.py` prints them.
"""

import ctypes
import os
import signal

from swapd.shared import vm
from swapd_client.errors import InvalidArgument
from swapd_client.faults.handler import ROW_BYTES, TEXT_MAX_BYTES, Handler, runs_here
from swapd_client.log import log
from swapd_client.memory import ranges

#: Further components are not explained.
ROWS_MAX = 16_384

#: A name of this length fits into a row even if every character is escaped.
_NAME_MAX_CHARS = TEXT_MAX_BYTES - 128

_TAIL = (
    b": it was read or written outside of a lease, or written to though it is read-only. Wrap the "
    b"access: `with client.acquire(...)`, or `with attachment.use(...)` if attached. Write to it "
    b"in `with attachment.edit(...)`, or register it with mutable=True; replace weights "
    b"(quantize_, share_memory_) before attach(), or after detach(). `python -X faulthandler` "
    b"shows the line.\n"
)
_TAIL_IN_CHILD = (
    b": this process was forked from its owner, and sessions and weights stay with the parent. "
    b"Connect in the child, or start it with spawn.\n"
)
#: For a child that inherited components and has others of its own.
_TAIL_OF_EITHER = (
    _TAIL.removesuffix(b"\n")
    + b" This process was forked: earlier components stay with the parent.\n"
)


class _Table:
    """The rows that handlers read, at an address that never changes."""

    def __init__(self) -> None:
        self.address = vm.map_anonymous(ROWS_MAX * ROW_BYTES)
        self.rows = 0
        self._free: list[int] = []
        self._row_of: dict[int, int] = {}

    @property
    def in_use(self) -> bool:
        return bool(self._row_of)

    def add(self, one: ranges.RegisteredRange) -> None:
        global _tail
        row = self._row_of.get(one.start)
        if row is None:
            if one.part is None or not one.part.where.addressable:
                return  # on a GPU: the CPU cannot touch it
            if not self._free and self.rows == ROWS_MAX:
                return
            row = self._free.pop() if self._free else self.rows
            self._row_of[one.start] = row
        self._write(row, one.start, one.end - one.start, _text(one))
        self.rows = max(self.rows, row + 1)
        if _tail is _TAIL_IN_CHILD:
            _tail = _TAIL_OF_EITHER
        _describe()

    def remove(self, one: ranges.RegisteredRange) -> None:
        if (row := self._row_of.pop(one.start, None)) is not None:
            self._words(row)[1] = 0
            self._free.append(row)

    def _write(self, row: int, start: int, nbytes: int, text: bytes) -> None:
        """The row has no range until it is complete: a thread may fault meanwhile."""
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
    """Have this process print an explanation when it dies of an access outside of a lease.

    On a segmentation fault or bus error at an address of a component (of any client of the process,
    now or later), one line on stderr names the component, the thread, and a remedy. Then the
    process dies as it would have: the previous handler of the signal runs (also `faulthandler`),
    and the exit signal and the core are the same. Other faults are unaffected. On the host device
    only: on a GPU such an access is an error of CUDA.

    Costs nothing until a fault. Call it after other code that installs handlers, or call it once
    more: a second call does nothing unless another handler has been installed since. Returns
    whether faults are explained. They are not on machines that are neither x86-64 nor aarch64, nor
    if memory must not become executable; the log says so.
    """
    global _table
    if not runs_here():
        log.info("faults are not explained: there is no handler for this machine")
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
                log.info("faults are not explained: %s", exc.strerror)
                return False
    return True


def explain_if(faults: str | None) -> None:
    """Apply `connect(faults=...)`. Raises: InvalidArgument if the value is unknown."""
    if faults == "explain":
        explain_faults()
    elif faults is not None:
        raise InvalidArgument(f"faults={faults!r}: give 'explain', or None")


def _text(one: ranges.RegisteredRange) -> bytes:
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
    if _table is not None and _table.in_use:  # else it inherited no components
        _tail = _TAIL_IN_CHILD
        _describe()


os.register_at_fork(after_in_child=_in_child)
