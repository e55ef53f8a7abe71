"""What a stage writes, as lines with its name in front. Pure: bytes in, bytes out.

May not live here: descriptors, threads.
"""

import re

#: A line that is longer is shown in pieces; and what stands without an end so long is shown, too.
LINE_MAX_BYTES = 16 << 10
UNENDED_S = 1.0
#: Stages take turns in these; each is bold.
_COLOURS = (36, 33, 35, 32, 34, 31)
#: Of what a terminal would obey, colours alone are left: they move nothing.
_COLOURED = re.compile(r"(\x1b\[[0-9;:]*m)")


class Lines:
    """The output of one stage, cut into lines. Holds at most one that has not ended."""

    def __init__(self) -> None:
        self._rest = b""
        self._since = 0.0

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """What has ended by it, without line ends."""
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
        """When what has not ended is to be shown all the same; None if there is nothing."""
        return self._since + UNENDED_S if self._rest else None

    def unended(self) -> list[bytes]:
        """The last line, which has no end: because it is due, or nothing more comes."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


def _pieces(line: bytes) -> list[bytes]:
    """A line in pieces that are not too long, cut between characters; one if it is empty."""
    found = []
    while len(line) > LINE_MAX_BYTES:
        at = LINE_MAX_BYTES
        while at > LINE_MAX_BYTES - 4 and line[at] & 0xC0 == 0x80:
            at -= 1
        found.append(line[:at])
        line = line[at:]
    return [*found, line]


def prefix(name: str, width: int, number: int, *, coloured: bool) -> bytes:
    """What is before each line of the stage with this number."""
    text = f"{name:<{width}} | "
    colour = _COLOURS[number % len(_COLOURS)]
    return (f"\x1b[1;{colour}m{text}\x1b[0m" if coloured else text).encode()


def on_terminal(line: bytes) -> bytes:
    r"""A line as a terminal may show it: what a progress bar shows last, and colours alone.

    The rest of what a terminal would obey, and what is no text, is escaped, as in \x1b.
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
