"""Writes the output of all stages to one stream, in whole lines, in its own thread.

A stage that writes too fast blocks on its own pipe: at most one line of each stage is held, and
stages are read in turn. If nobody reads the stream, stages block, but their runner does not.
"""

import os
import re
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from swapd.shared.text import plain

_READ_BYTES = 64 << 10
#: Capacity of a pipe: the most that an ended stage can leave in it.
_PIPE_MAX_BYTES = 1 << 20
#: A longer line is shown in pieces. An unfinished line is shown after UNENDED_S seconds.
LINE_MAX_BYTES = 16 << 10
UNENDED_S = 1.0
_COLOURS = (36, 33, 35, 32, 34, 31)
#: Colours, the only control sequences that stay: they move nothing.
_COLOURED = re.compile(r"(\x1b\[[0-9;:]*m)")


class Pipe:
    """The output of one start of a stage. The caller closes `theirs`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = Lines()
        self.ours, self.theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.ours, False)


class Output:
    """Writes the stages' output to `out` and swapd's messages to `err`, in order. Owns neither."""

    def __init__(
        self,
        names: Sequence[str],
        out: int,
        err: int,
        *,
        terminal: bool = False,
        coloured: bool = False,
    ) -> None:
        width = max(map(len, names))
        self._prefixes = {
            name: prefix(name, width, number, coloured=coloured)
            for number, name in enumerate(names)
        }
        self._out, self._err = out, err
        self.broken = False
        self._shown = on_terminal if terminal else bytes
        self._losing = False
        self._pipes: set[Pipe] = set()
        self._selector = selectors.DefaultSelector()
        self._orders: deque[Callable[[], None]] = deque()
        self._wake_in, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def begins(self, name: str) -> Pipe:
        """Raises: OSError."""
        pipe = Pipe(name)
        self._order(partial(self._begin, pipe))
        return pipe

    def ends(self, pipe: Pipe) -> None:
        """Show the remaining output of a stage that ended, before any later output of others."""
        self._order(partial(self._end, pipe))

    def say(self, text: str) -> None:
        self._order(partial(self._say, f"swapd: {plain(text)}\n".encode(errors="replace")))

    def close(self) -> None:
        """Block until all is written, or `out` has no reader."""
        self._order(self._end_all)
        self._thread.join()
        self._selector.close()
        os.close(self._wake_in)
        os.close(self._wake)

    # --- in the thread --------------------------------------------------------------------

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        with suppress(BlockingIOError):  # the pipe is full, so the thread is awake
            os.write(self._wake, b"\0")

    def _run(self) -> None:
        while not self._ends:
            readable = self._selector.select(self._wait_s())
            with suppress(BlockingIOError):
                os.read(self._wake_in, 4096)
            while self._orders:
                self._orders.popleft()()
            self._read_each(readable)
            self._show_unended()

    def _wait_s(self) -> float | None:
        due = [at for pipe in self._pipes if (at := pipe.lines.due) is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _show_unended(self) -> None:
        now = time.monotonic()
        for pipe in self._pipes:
            if pipe.lines.due is not None and pipe.lines.due <= now:
                self._show(pipe.name, pipe.lines.unended())

    def _begin(self, pipe: Pipe) -> None:
        self._pipes.add(pipe)
        self._selector.register(pipe.ours, selectors.EVENT_READ, pipe)

    def _say(self, words: bytes) -> None:
        self._read_each(self._selector.select(0))
        self._write(self._err, words)

    def _read_each(self, found: Iterable[tuple[selectors.SelectorKey, int]]) -> None:
        for key, _ in found:
            if key.data in self._pipes:  # an order may have closed it
                self._read(key.data)

    def _read(self, pipe: Pipe) -> int:
        try:
            data = os.read(pipe.ours, _READ_BYTES)
        except BlockingIOError:
            return 0
        if data:
            self._show(pipe.name, pipe.lines.feed(data, time.monotonic()))
        else:
            self._close(pipe)
        return len(data)

    def _end(self, pipe: Pipe) -> None:
        left = _PIPE_MAX_BYTES
        while pipe in self._pipes and left > 0 and (count := self._read(pipe)):
            left -= count
        self._close(pipe)  # processes that the stage left behind might still write

    def _close(self, pipe: Pipe) -> None:
        if pipe in self._pipes:
            self._pipes.remove(pipe)
            self._selector.unregister(pipe.ours)
            self._show(pipe.name, pipe.lines.unended())
            os.close(pipe.ours)

    def _end_all(self) -> None:
        for pipe in list(self._pipes):
            self._end(pipe)
        self._ends = True

    def _show(self, name: str, lines: Sequence[bytes]) -> None:
        if lines:
            before = self._prefixes[name]
            self._write(self._out, b"".join(b"%s%s\n" % (before, self._shown(x)) for x in lines))

    def _write(self, to: int, data: bytes) -> None:
        if to == self._out and self.broken:
            return
        left = memoryview(data)
        try:
            while left:
                left = left[_written(to, left) :]
        except OSError as exc:
            if to == self._out:
                self._say_lost(exc)
        else:
            if to == self._out and self._losing:
                self._losing = False
                self.say("the output of stages is shown again")

    def _say_lost(self, exc: OSError) -> None:
        self.broken = isinstance(exc, BrokenPipeError)
        if not self._losing:
            self._losing = True
            self.say(f"the output of stages cannot be shown: {exc.strerror}")


def _written(to: int, data: memoryview) -> int:
    try:
        return os.write(to, data)
    except BlockingIOError:  # another process has made the shared terminal non-blocking
        select.select((), (to,), ())
        return 0


# --- lines ---------------------------------------------------------------------------------


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
        return self._since + UNENDED_S if self._rest else None

    def unended(self) -> list[bytes]:
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


def _pieces(line: bytes) -> list[bytes]:
    found = []
    while len(line) > LINE_MAX_BYTES:
        at = LINE_MAX_BYTES
        while at > LINE_MAX_BYTES - 4 and line[at] & 0xC0 == 0x80:
            at -= 1
        found.append(line[:at])
        line = line[at:]
    return [*found, line]


def prefix(name: str, width: int, number: int, *, coloured: bool) -> bytes:
    text = f"{name:<{width}} | "
    colour = _COLOURS[number % len(_COLOURS)]
    return (f"\x1b[1;{colour}m{text}\x1b[0m" if coloured else text).encode()


def on_terminal(line: bytes) -> bytes:
    r"""Return a line as a terminal may show it: the last state of a progress bar, with its colours.

    Other control sequences and bytes that are not text are escaped, as in \x1b.
    """
    last = line.rstrip(b"\r").rpartition(b"\r")[2]
    text = last.decode(errors="backslashreplace")
    if text.isprintable():
        return text.encode()
    parts = _COLOURED.split(text)
    parts[::2] = ("\t".join(map(plain, part.split("\t"))) for part in parts[::2])
    return ("".join(parts) + ("\x1b[0m" if len(parts) > 1 else "")).encode()
