"""Garbage that the collector finds inside of a call, while other threads run."""

import gc
import threading
from collections.abc import Callable

#: Calls of one test.
TIMES = 100
THREADS = 4


class Cycle:
    """Only the collector ends it."""

    def __init__(self) -> None:
        self.itself = self


def collected_in(call: Callable[[], object], before: Callable[[Cycle], object]) -> None:
    """Call `call()` again and again. Each time the collector finds a cycle as soon as any object is
    made; `before` gets the cycle, to note what then happens."""
    ends = threading.Event()
    for _ in range(THREADS):
        threading.Thread(target=ends.wait).start()
    for _ in range(TIMES):
        gc.disable()
        before(Cycle())
        gc.set_threshold(1)
        gc.enable()
        call()
    ends.set()
