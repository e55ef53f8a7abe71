"""Calls that a task makes in threads, and how they learn that the task is cancelled."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar

T = TypeVar("T")

#: Set when the task for which a thread makes its calls is cancelled.
cancelled: ContextVar[threading.Event | None] = ContextVar("cancelled", default=None)


def stop_if_cancelled() -> None:
    """Raise CancelledError if `cancelled` is set, only once: the caller undoes its work then."""
    event = cancelled.get()
    if event is not None and event.is_set():
        event.clear()
        raise asyncio.CancelledError


async def in_thread(
    call: Callable[[], T],
    give_up: Callable[[], object] = lambda: None,
    undo: Callable[[T], object] = lambda _: None,
) -> T:
    """Call in a thread, and return after it has ended, even when cancelled.

    On cancellation `give_up()` makes the call end soon. If the call succeeds all the same, `undo`
    gets its result, in a thread.
    """
    run = copy_context().run
    calling = asyncio.get_running_loop().run_in_executor(None, run, call)
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        give_up()
        while not calling.done():  # a second cancellation must not leave it running
            with suppress(asyncio.CancelledError):
                await asyncio.wait([calling])
        if not calling.cancelled() and calling.exception() is None:
            await in_thread(partial(undo, calling.result()))
        raise


async def cancellable(call: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """As `in_thread`; `cancelled` is set in the thread once the task is cancelled."""
    event = threading.Event()
    token = cancelled.set(event)  # the thread has a copy of this context

    def undone(made: T) -> None:
        event.clear()  # else its first request would raise
        undo(made)

    try:
        return await in_thread(call, event.set, undone)
    finally:
        cancelled.reset(token)
