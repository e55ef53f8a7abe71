"""Closes the sessions of clients that were collected without `close`, each in a thread of its own.

The garbage collector runs in any thread, at any point, under any lock, so a finalizer takes none.
"""

import _thread
import gc
import os
import select
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from swapd_client.leases.collected import await_given_back
from swapd_client.session.session import Session

#: Seconds between two looks at the leases of a collected client.
LOOK_S = 0.1
#: Seconds that a name may stay taken by a client that was collected.
AWAIT_S = 5.0

#: Set when the session of a collected client is closed, or cannot be.
_closing: set[threading.Event] = set()
os.register_at_fork(after_in_child=_closing.clear)


def close_when_collected(
    client: object, session: Session, in_use: Callable[[], bool], close: Callable[[], None]
) -> "weakref.finalize[..., object]":
    """Call `close()` in a thread once `client` is collected and no lease is `in_use()`."""
    closing = weakref.finalize(client, _collected, session, in_use, close)
    closing.atexit = False
    return closing


def await_closed() -> bool:
    """Collect garbage, and close the clients in it. Returns whether there was any. Blocks."""
    gc.collect()
    await_given_back()
    return any([closed.wait(AWAIT_S) for closed in _closing.copy()])


def _collected(session: Session, in_use: Callable[[], bool], close: Callable[[], None]) -> None:
    if session.forked:
        return
    closed = threading.Event()
    _closing.add(closed)

    def run() -> None:
        try:
            while session.error is None and in_use():
                select.select([session.life.ended.fileno()], [], [], LOOK_S)
            with suppress(Exception):  # no caller is there to get the error
                close()
        finally:
            closed.set()
            _closing.discard(closed)

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # the process is ending, and its session with it
        _closing.discard(closed)
