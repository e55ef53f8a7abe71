"""The numbers by which the daemon knows the threads and tasks of this process.

An agent that is over may have left its lease to others. So no later one has its number, as it may
have its ident, or its address.
"""

import asyncio
import itertools
import threading
from typing import Any
from weakref import WeakKeyDictionary

_numbers = itertools.count(1)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.number = next(_numbers)


this_thread = _Thread()
_tasks: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def task() -> int:
    """Return the number of the running task."""
    running = asyncio.current_task()
    return _tasks.get(running) or _tasks.setdefault(running, next(_numbers))
