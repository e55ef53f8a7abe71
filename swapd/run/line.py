"""One line at the bottom of the terminal that says what happens, while a command prints above it.

The terminal is told to scroll all lines but the last one, as package managers do. Where stderr is
no terminal nothing is shown.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from swapd.shared.protocol import StatusReply
from swapd.shared.text import plain

#: With fewer rows the command has them all.
_ROWS_MIN = 5
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


class Line:
    """The bottom line of a terminal; `say` what it is to be."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._rows = 0

    def say(self, text: str) -> None:
        """Show it; the rest of a text that is longer than the terminal is wide is cut off."""
        columns, rows = os.get_terminal_size(self._out.fileno())
        if rows < _ROWS_MIN:
            return self.close()
        if rows != self._rows:  # at first, and when the terminal has another size
            self._reserve(rows)
        shown = text[: columns - 1]
        self._write(f"{_SAVE}\x1b[{rows};1H{_CLEAR}\x1b[7m{shown}\x1b[0m{_RESTORE}")

    def close(self) -> None:
        """The command has all lines again. More than once is once."""
        if rows := self._rows:
            self._rows = 0
            self._write(f"{_SAVE}\x1b[r\x1b[{rows};1H{_CLEAR}{_RESTORE}")

    def _reserve(self, rows: int) -> None:
        self.close()
        self._rows = rows
        self._write(f"\n{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}\x1b[1A")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


@contextmanager
def shown() -> Iterator[Line | None]:
    """A line while the block runs; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    line = Line(sys.stderr)
    try:
        yield line
    finally:
        line.close()


def words(replies: Sequence[StatusReply], swaps_a_minute: float) -> str:
    """What is in, who waits, how much is swapped."""
    told = []
    for reply in replies:
        inside = [c.part_of or c.name for c in reply.components if c.state in _IN]
        names = " + ".join(plain(name) for name in dict.fromkeys(inside)) or "nothing"
        device = f"{reply.device}: " if len(replies) > 1 else ""
        waits = f", {reply.waiting} wait" if reply.waiting else ""
        told.append(f"{device}{names} in{waits}")
    return f"swapd | {'; '.join(told)} | {swaps_a_minute:.0f} swaps a minute"


_IN = frozenset(("leased", "idle", "resident", "loading", "revoking", "writing back"))
