"""The output of all stages on one stream, whole lines only; a thread of its own writes it.

Whoever writes too fast waits in its own pipe: at most one line of each stage is kept here, and
each is read in turn. If nobody reads the stream, stages wait, and those who look after them do not.
"""

import os
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from swapd.run.several.lines import Lines, on_terminal, prefix
from swapd.shared.text import plain

#: Of each stage in its turn.
_READ_BYTES = 64 << 10
#: What a pipe can hold, and so what its stage can have left behind.
_PIPE_MAX_BYTES = 1 << 20


class Pipe:
    """What one start of a stage writes to. `theirs` is the caller's to close."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = Lines()
        self.ours, self.theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.ours, False)


class Output:
    """Writes to `out` what stages write, and to `err` what swapd says of them, in that order.

    Owns neither.
    """

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
        #: Nobody can read `out` any more.
        self.broken = False
        self._shown = on_terminal if terminal else bytes
        #: What was last written there was lost.
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
        """A stage is to start. Raises: OSError."""
        pipe = Pipe(name)
        self._order(partial(self._begin, pipe))
        return pipe

    def ends(self, pipe: Pipe) -> None:
        """A stage has ended: what it has written is shown, and no more."""
        self._order(partial(self._end, pipe))

    def say(self, text: str) -> None:
        """A line of swapd's own, after what stages had written."""
        self._order(
            partial(self._write, self._err, f"swapd: {plain(text)}\n".encode(errors="replace"))
        )

    def close(self) -> None:
        """Returns when all is written, or nobody can read it."""
        self._order(self._end_all)
        self._thread.join()
        self._selector.close()
        os.close(self._wake_in)
        os.close(self._wake)

    # --- in the thread --------------------------------------------------------------------

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        with suppress(BlockingIOError):  # it is awake
            os.write(self._wake, b"\0")

    def _run(self) -> None:
        while not self._ends:
            for key, _ in self._selector.select(self._wait_s()):
                if key.fd == self._wake_in:
                    with suppress(BlockingIOError):
                        os.read(self._wake_in, 4096)
                else:
                    self._read(key.data)
            while self._orders:
                self._orders.popleft()()
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

    def _read(self, pipe: Pipe) -> int:
        """How much there was."""
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
        self._close(pipe)  # others, that it has left behind, might still write

    def _close(self, pipe: Pipe) -> None:
        """More than once is once."""
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
                self.say("what stages write is shown again")

    def _say_lost(self, exc: OSError) -> None:
        self.broken = isinstance(exc, BrokenPipeError)
        if not self._losing:
            self._losing = True
            self.say(f"what stages write cannot be shown: {exc.strerror}")


def _written(to: int, data: memoryview) -> int:
    try:
        return os.write(to, data)
    except BlockingIOError:  # another process that has the same terminal wants it so
        select.select((), (to,), ())
        return 0
