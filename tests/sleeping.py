"""Counts how often threads go to sleep: each wake-up ends in another sleep."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path


def sleeps() -> dict[str, int]:
    """The number of sleeps since its start of each other Python thread of this process, by name.

    Waits until all of them sleep: a thread that was woken before may not have run yet. One that
    waits for the GIL sleeps, too; but where the GIL is free for a while, it runs or is ready to.
    """
    counts, before = _counts(), None
    while counts != before:
        time.sleep(0.001)
        counts, before = _counts(), counts
    return counts


def _counts() -> dict[str, int]:
    counts: dict[str, int] = {}
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.native_id is None:
            continue
        with suppress(FileNotFoundError):  # the thread is ending
            while (status := _status(thread.native_id))["State"] != "S":
                os.sched_yield()
            n = int(status["voluntary_ctxt_switches"])
            counts[thread.name] = counts.get(thread.name, 0) + n
    return counts


def _status(thread: int) -> dict[str, str]:
    """The first word of each field of the kernel's status of a thread, by name."""
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    words = [line.split() for line in lines]
    return {first[0].rstrip(":"): first[1] for first in words if len(first) > 1}


def more_sleeps(before: dict[str, int]) -> dict[str, int]:
    """The number of sleeps since `before`, without threads that slept throughout."""
    more = {name: n - before.get(name, 0) for name, n in sleeps().items()}
    return {name: n for name, n in more.items() if n}
