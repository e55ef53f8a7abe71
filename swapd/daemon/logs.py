"""The daemon's messages to people, on stderr. A thread writes them, so that the loop never waits.

The reader of stderr may have stopped reading; a daemon that wrote there itself would stop too.
"""

import logging
import os
import threading
from collections import deque

from swapd.shared import system

#: Lines that wait to be written. Beyond that the newest are dropped, and counted.
WAITING_MAX = 1000
#: How long the last lines may take to be written.
CLOSE_S = 0.5


class StderrHandler(logging.Handler):
    """Hands formatted records to a thread that writes them to stderr."""

    def __init__(self) -> None:
        """Raises: LimitError if there is no room for the thread."""
        super().__init__()
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="swapd-log", daemon=True)
        system.start(self._thread)

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        with self._change:
            if len(self._lines) < WAITING_MAX:
                self._lines.append(line)
            else:
                self._dropped += 1
            self._change.notify()

    def close(self) -> None:
        """Wait until all is written: CLOSE_S at most."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join(CLOSE_S)
        super().close()

    def _run(self) -> None:
        while (line := self._next()) is not None:
            try:  # not by sys.stderr: the interpreter could not end while this thread held its lock
                _write(f"{line}\n".encode(errors="backslashreplace"))
            except OSError:  # its reader is gone
                return

    def _next(self) -> str | None:
        with self._change:
            self._change.wait_for(lambda: self._lines or self._dropped or self._closed)
            if self._lines:
                return self._lines.popleft()
            dropped, self._dropped = self._dropped, 0
            return f"dropped {dropped} lines: stderr was not read in time" if dropped else None


def _write(data: bytes) -> None:
    """Write all of it to stderr. Raises: OSError."""
    while data:
        data = data[os.write(2, data) :]
