"""What becomes garbage while it is held is given back, in a thread of its own.

The garbage collector runs in any thread, in the midst of anything, under any lock: what is done
there may take none. To give back a lease takes several.
"""

import _thread
import os
import queue
from collections.abc import Callable
from contextlib import suppress

GiveBack = Callable[[], None]


class _Collected:
    """A queue that may be put to by a finalizer, and the thread that empties it."""

    def __init__(self) -> None:
        self.start_over()
        os.register_at_fork(after_in_child=self.start_over)  # what is in it is the parent's

    def start_over(self) -> None:
        self._queue: queue.SimpleQueue[GiveBack] = queue.SimpleQueue()
        self._is_running = False

    def put(self, give_back: GiveBack) -> None:
        self._queue.put(give_back)
        if not self._is_running:
            with suppress(RuntimeError):  # the process ends, and its leases with it
                _thread.start_new_thread(self._run, (self._queue,))
                self._is_running = True

    def _run(self, given: "queue.SimpleQueue[GiveBack]") -> None:
        while True:
            with suppress(Exception):  # there is nobody to tell
                given.get()()


_collected = _Collected()


def give_back_later(give_back: GiveBack) -> None:
    """Have `give_back()` called by another thread. Takes no lock; for finalizers."""
    _collected.put(give_back)
