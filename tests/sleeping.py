"""How often threads go to sleep: who is woken up goes to sleep again."""

import os
import threading
from contextlib import suppress
from pathlib import Path


def sleeps() -> dict[str, int]:
    """How often each other thread of this process's Python has, since it began, by name.

    Waits until all of them sleep: one that was woken before may not have come to run yet.
    """
    counts: dict[str, int] = {}
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.native_id is None:
            continue
        with suppress(FileNotFoundError):  # it ends this moment
            while (status := _status(thread.native_id))["State"] != "S":
                os.sched_yield()
            n = int(status["voluntary_ctxt_switches"])
            counts[thread.name] = counts.get(thread.name, 0) + n
    return counts


def _status(thread: int) -> dict[str, str]:
    """The first word of each line of what the kernel says of it, by name."""
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    words = [line.split() for line in lines]
    return {first[0].rstrip(":"): first[1] for first in words if len(first) > 1}


def more_sleeps(before: dict[str, int]) -> dict[str, int]:
    """Since then, without those that slept on."""
    more = {name: n - before.get(name, 0) for name, n in sleeps().items()}
    return {name: n for name, n in more.items() if n}
