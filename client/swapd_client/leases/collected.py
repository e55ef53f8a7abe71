"""Releases leases of collected objects in a thread of its own.

The garbage collector runs in any thread, at any point, under any lock, so a finalizer must take no
lock. Releasing a lease takes several.
"""

import _thread
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

GiveBack = Callable[[], None]

#: Callers want to see the releases done. A daemon that takes longer than this is stopped.
AWAIT_S = 5.0


class _Collected:
    """A queue that finalizers can put to, and the thread that empties it."""

    def __init__(self) -> None:
        self.start_over()
        os.register_at_fork(after_in_child=self.start_over)  # its items belong to the parent

    def start_over(self) -> None:
        self._queue: queue.SimpleQueue[GiveBack] = queue.SimpleQueue()
        self._is_running = False
        self._runs_in = 0

    def put(self, give_back: GiveBack) -> None:
        self._queue.put(give_back)
        if not self._is_running:
            with suppress(RuntimeError):  # the process is ending, and its leases with it
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
            with suppress(Exception):  # no caller is there to get the error
                given.get()()


_collected = _Collected()


def give_back_later(give_back: GiveBack) -> None:
    """Have another thread call `give_back()`. Takes no lock; for finalizers."""
    _collected.put(give_back)


def await_given_back() -> None:
    """Block until all releases queued by now are done. Hold no lock that a release takes."""
    _collected.flush()
