"""The work that collected clients, models and leases leave behind, in threads of its own.

The garbage collector runs in any thread, at any point, under any lock, or in a forked child. So a
finalizer takes no lock, and leaves the work to a thread that runs already: CPython takes a lock of
its own to start one.
"""

import _thread
import gc
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from swapd_client.session.session import Session

LOOK_S = 0.1

#: One event for each piece of work, set when it is done.
_under_way: set[threading.Event] = set()
os.register_at_fork(after_in_child=_under_way.clear)


def when_collected(
    thing: object, session: Session, work: Callable[[], object]
) -> "weakref.finalize[..., object]":
    """Call `work()` in a thread once `thing` is collected."""
    _collected.begin()
    finalizer = weakref.finalize(thing, _begin, session, work)
    finalizer.atexit = False
    return finalizer


def close_when_collected(
    client: object, session: Session, in_use: Callable[[], bool], close: Callable[[], None]
) -> "weakref.finalize[..., object]":
    """Call `close()` in a thread once `client` is collected and no lease is in use."""

    def close_at_last() -> None:
        while session.error is None and in_use():
            session.life.ended.await_readable(LOOK_S)
        close()

    def work() -> None:
        if session.error is None and in_use():  # `settle` does not wait for the user's leases
            _start(close_at_last, threading.Event())
        else:
            close()

    return when_collected(client, session, work)


def settle(within_s: float = threading.TIMEOUT_MAX) -> None:
    """Collect garbage, and wait until the work that it left is done, `within_s` at most."""
    gc.collect()
    await_given_back()
    until = time.monotonic() + within_s
    while one := next(iter(_under_way.copy()), None):  # a model's work may free its client
        if not one.wait(max(until - time.monotonic(), 0)):
            return


def _begin(session: Session, work: Callable[[], object]) -> None:
    if session.forked:
        return
    done = threading.Event()
    _under_way.add(done)
    give_back_later(partial(_start, work, done))


def _start(work: Callable[[], object], done: threading.Event) -> None:
    try:
        _thread.start_new_thread(_run, ([work], done))
    except RuntimeError:  # no thread can be started any more
        _run([work], done)


def _run(left: list[Callable[[], object]], done: threading.Event) -> None:
    try:
        with suppress(Exception):  # no caller is there to get the error
            left.pop()()  # no reference stays: it may be a client's last
    finally:
        _under_way.discard(done)
        done.set()


# --- leases of collected objects, in one thread ------------------------------------------------

GiveBack = Callable[[], None]

#: Seconds to wait for releases. A daemon that takes longer is stopped.
AWAIT_S = 5.0


class _FinalizerQueue:
    """A queue that finalizers can fill, and the thread that empties it."""

    def __init__(self) -> None:
        self.start_over()
        os.register_at_fork(after_in_child=self.start_over)  # its items belong to the parent

    def start_over(self) -> None:
        self.queue: queue.SimpleQueue[GiveBack] = queue.SimpleQueue()
        self._is_running = False
        self._runs_in = 0

    def begin(self) -> None:
        """Start the thread. Not for finalizers."""
        if not self._is_running:
            _thread.start_new_thread(self._run, (self.queue,))
            self._is_running = True

    def flush(self) -> None:
        if self._is_running and threading.get_ident() != self._runs_in:
            done = threading.Event()
            self.queue.put(done.set)
            done.wait(AWAIT_S)

    def _run(self, given: "queue.SimpleQueue[GiveBack]") -> None:
        self._runs_in = threading.get_ident()
        while True:
            with suppress(Exception):  # no caller is there to get the error
                given.get()()


_collected = _FinalizerQueue()


def give_back_later(give_back: GiveBack) -> None:
    """Call `give_back()` in another thread. For finalizers: takes no lock."""
    _collected.queue.put(give_back)


def await_given_back() -> None:
    """Block until all queued releases are done. Hold no lock that a release takes."""
    _collected.flush()
