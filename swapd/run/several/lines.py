"""A stage's output, as lines with its name in front. Pure: bytes in, bytes out.

May not live here: descriptors, threads.
"""

import re

#: A longer line is shown in pieces; an unfinished line is shown after UNENDED_S.
LINE_MAX_BYTES = 16 << 10
UNENDED_S = 1.0
#: Colours of the stages, in turn, all bold.
_COLOURS = (36, 33, 35, 32, 34, 31)
#: The only control sequences that stay: colours, which move nothing.
_COLOURED = re.compile(r"(\x1b\[[0-9;:]*m)")


class Lines:
    """The output of one stage, cut into lines. Holds at most one unfinished line."""

    def __init__(self) -> None:
        self._rest = b""
        self._since = 0.0

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Take some output; return the lines that it finishes, without line ends."""
        if not self._rest:
            self._since = now
        *whole, rest = (self._rest + data).split(b"\n")
        if whole:
            self._since = now
        found = [piece for line in whole for piece in _pieces(line)]
        *full, self._rest = _pieces(rest)
        return found + full

    @property
    def due(self) -> float | None:
        """The time at which to show an unfinished line; None if there is none."""
        return self._since + UNENDED_S if self._rest else None

    def unended(self) -> list[bytes]:
        """The unfinished line, which is due, or will not be finished."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


def _pieces(line: bytes) -> list[bytes]:
    """A line in pieces of bounded length, cut between characters; one if it is empty."""
    found = []
    while len(line) > LINE_MAX_BYTES:
        at = LINE_MAX_BYTES
        while at > LINE_MAX_BYTES - 4 and line[at] & 0xC0 == 0x80:
            at -= 1
        found.append(line[:at])
        line = line[at:]
    return [*found, line]


def prefix(name: str, width: int, number: int, *, coloured: bool) -> bytes:
    """The prefix for each line of the stage with this number."""
    text = f"{name:<{width}} | "
    colour = _COLOURS[number % len(_COLOURS)]
    return (f"\x1b[1;{colour}m{text}\x1b[0m" if coloured else text).encode()


def on_terminal(line: bytes) -> bytes:
    r"""A line as a terminal may show it: the last state of a progress bar, with its colours.

    It escapes other control sequences and bytes that are not text, as in \x1b.
    """
    last = line.rstrip(b"\r").rpartition(b"\r")[2]
    text = last.decode(errors="backslashreplace")
    if text.isprintable():
        return text.encode()
    parts = _COLOURED.split(text)
    parts[::2] = (_shown(part) for part in parts[::2])
    return ("".join(parts) + ("\x1b[0m" if len(parts) > 1 else "")).encode()


def _shown(text: str) -> str:
    return "".join(
        c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text
    )
