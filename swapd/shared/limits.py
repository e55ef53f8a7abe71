"""System limits of this process, checked when it starts: open files, and threads.

All threads start at once, because a later start may fail, and its caller has no fallback.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import ParamSpec, TypeVar

from swapd.shared import fds

P = ParamSpec("P")
T = TypeVar("T")

#: The limits on threads, as a message names them.
OF_THREADS = (
    "`ulimit -u` (LimitNPROC, TasksMax in a unit), the container's limit of pids, or `ulimit -v`"
)


class LimitError(Exception):
    """The system grants this process too little to serve. The message names the limit to raise."""


def raise_open_files() -> None:
    """Raise the limit of descriptors to its maximum. Raises: LimitError if that is too few."""
    most = fds.raise_limit()
    if most < fds.LEAST:
        raise LimitError(
            f"a daemon needs {fds.LEAST} open files, and this process may have {most}: set "
            f"`ulimit -n {fds.LEAST}` or more (LimitNOFILE in a unit); each component takes one, "
            "each session three"
        )


class Threads(ThreadPoolExecutor):
    """Threads that all run from the start, and whose work a loop can await."""

    def __init__(self, threads: int, name: str) -> None:
        """Raises: LimitError."""
        super().__init__(threads, name)
        meeting = self._meeting = threading.Barrier(threads)
        try:
            # each task holds one thread until all tasks have come, so each needs its own thread
            wait([self.submit(meeting.wait) for _ in range(threads)])
        except (RuntimeError, MemoryError) as exc:
            meeting.abort()
            self.shutdown(cancel_futures=True)
            raise no_thread(name) from exc

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a call in one of the threads. If this is cancelled, a call that has not
        begun never begins; another goes on."""
        return await asyncio.wrap_future(self.submit(call, *args, **kwargs))

    async def finish(self) -> None:
        """Wait until the threads have done all work that was submitted before."""
        meet = self._meeting.wait
        await asyncio.gather(*(self.run(meet) for _ in range(self._meeting.parties)))


def start(thread: threading.Thread) -> None:
    """Start `thread`. Raises: LimitError."""
    try:
        thread.start()
    except (RuntimeError, MemoryError) as exc:
        raise no_thread(thread.name) from exc


def no_thread(name: str) -> LimitError:
    return LimitError(
        f"the thread {name} cannot be started: this process may have no more. Raise {OF_THREADS}"
    )
