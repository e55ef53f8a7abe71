"""Threads of a test."""

import threading
from collections.abc import Callable


def started(call: Callable[..., object], *args: object, daemon: bool = False) -> threading.Thread:
    thread = threading.Thread(target=call, args=args, daemon=daemon)
    thread.start()
    return thread


def run_together(*threads: threading.Thread) -> None:
    """Start all of them, and wait until all have ended."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
