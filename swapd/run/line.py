"""A status line at the bottom of the terminal, while a command prints above it.

It has the terminal scroll all lines but the last, as package managers do. It shows nothing if
stderr is not a terminal.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from swapd.shared.protocol import StatusReply
from swapd.shared.text import plain

#: With fewer rows there is no status line.
_ROWS_MIN = 5
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


class Line:
    """The bottom line of a terminal; `say` sets its text."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._rows = 0

    def say(self, text: str) -> None:
        """Show `text`, cut to the terminal's width."""
        columns, rows = os.get_terminal_size(self._out.fileno())
        if rows < _ROWS_MIN:
            return self.close()
        if rows != self._rows:  # at first, and after a change of the terminal's size
            self._reserve(rows)
        shown = text[: columns - 1]
        self._write(f"{_SAVE}\x1b[{rows};1H{_CLEAR}\x1b[7m{shown}\x1b[0m{_RESTORE}")

    def close(self) -> None:
        """Give all lines back to the command. Repeated calls do nothing."""
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
    """A line while the block runs; None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    line = Line(sys.stderr)
    try:
        yield line
    finally:
        line.close()


def words(replies: Sequence[StatusReply], swaps_a_minute: float) -> str:
    """The text of the line: resident components, waits, and the rate of swaps."""
    told = []
    for reply in replies:
        inside = [c.part_of or c.name for c in reply.components if c.state in _IN]
        names = " + ".join(plain(name) for name in dict.fromkeys(inside)) or "nothing"
        device = f"{reply.device}: " if len(replies) > 1 else ""
        waits = f", {reply.waiting} wait" if reply.waiting else ""
        told.append(f"{device}{names} in{waits}")
    return f"swapd | {'; '.join(told)} | {swaps_a_minute:.0f} swaps a minute"


_IN = frozenset(("leased", "idle", "resident", "loading", "revoking", "writing back"))
