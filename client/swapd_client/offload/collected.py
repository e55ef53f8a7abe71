"""What becomes garbage while it is held is given back, in a thread of its own.

The garbage collector runs in any thread, in the midst of anything, under any lock: what is done
there may take none. To give back a lease takes several.
"""

import _thread
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

GiveBack = Callable[[], None]

#: Who asks is told what is true; who cannot be answered in this time has a daemon that is stopped.
AWAIT_S = 5.0


class _Collected:
    """A queue that may be put to by a finalizer, and the thread that empties it."""

    def __init__(self) -> None:
        self.start_over()
        os.register_at_fork(after_in_child=self.start_over)  # what is in it is the parent's

    def start_over(self) -> None:
        self._queue: queue.SimpleQueue[GiveBack] = queue.SimpleQueue()
        self._is_running = False
        self._runs_in = 0

    def put(self, give_back: GiveBack) -> None:
        self._queue.put(give_back)
        if not self._is_running:
            with suppress(RuntimeError):  # the process ends, and its leases with it
                _thread.start_new_thread(self._run, (self._queue,))
                self._is_running = True

    def flush(self) -> None:
        if self._is_running and threading.get_ident() != self._runs_in:
            done = threading.Event()
            self._queue.put(done.set)
            done.wait(AWAIT_S)

    def _run(self, given: "queue.SimpleQueue[GiveBack]") -> None:
        self._runs_in = threading.get_ident()
        while True:
            with suppress(Exception):  # there is nobody to tell
                given.get()()


_collected = _Collected()


def give_back_later(give_back: GiveBack) -> None:
    """Have `give_back()` called by another thread. Takes no lock; for finalizers."""
    _collected.put(give_back)


def await_given_back() -> None:
    """Block until what was collected by now is given back; under no lock that takes."""
    _collected.flush()
