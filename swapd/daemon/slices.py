"""Long work for several sessions in a few threads: a slice for one, then a slice for another.

So short work of one session waits at most for a slice of another's long work. Knows nothing about
the work itself.
"""

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from swapd.shared import limits

Result = TypeVar("Result")

#: Work that yields after each slice, and returns its result.
Work = Generator[None, None, Result]

_Job = tuple[Work[Any], "Future[Any]"]


def whole(work: Work[Result]) -> Result:
    """Do all of it at once, in this thread."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: Result = done.value
            return result


class Slices:
    """Runs submitted work: that of one session in order, that of several in turn.

    All its threads are there from the start.
    """

    def __init__(self, threads: int, name: str) -> None:
        """Raises: LimitError."""
        self._change = threading.Condition()
        #: Jobs by session, in order of turns; without a session while one of its slices runs.
        self._jobs: OrderedDict[int, deque[_Job]] = OrderedDict()
        self._busy: dict[int, deque[_Job]] = {}
        self._closed = False
        #: Done when no slice runs any more, after `close`.
        self._idle: Future[None] = Future()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            limits.start(thread)

    def submit(self, session: int, work: Work[Result]) -> "Future[Result]":
        """Queue work behind earlier work of this session.

        `close` cancels the future if the work is not done.
        """
        future: Future[Result] = Future()
        with self._change:
            if self._closed:
                future.cancel()
                return future
            jobs = self._busy.get(session)
            if jobs is None:
                jobs = self._jobs.setdefault(session, deque())
            jobs.append((work, future))
            self._change.notify()
        return future

    def close(self) -> "Future[None]":
        """Begin no more slices; the future is done when the running ones have ended."""
        with self._change:
            self._closed = True
            for jobs in self._jobs.values():
                _cancel(jobs)
            self._jobs.clear()
            self._note_idle()
            self._change.notify_all()
        return self._idle

    async def finish(self) -> None:
        """`close`, and wait for it."""
        await asyncio.wrap_future(self.close())

    def shutdown(self) -> None:
        """`close`, and end the threads. Blocks."""
        self.close()
        for thread in self._threads:
            thread.join()

    def _note_idle(self) -> None:
        if self._closed and not self._busy and not self._idle.done():
            self._idle.set_result(None)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            session, (work, future) = taken
            self._give_back(session, done=_slice_of(work, future))

    def _take(self) -> tuple[int, _Job] | None:
        """A job of the session whose turn it is; None when no more will come."""
        with self._change:
            self._change.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return None
            session, jobs = self._jobs.popitem(last=False)
            self._busy[session] = jobs
            return session, jobs[0]

    def _give_back(self, session: int, *, done: bool) -> None:
        with self._change:
            jobs = self._busy.pop(session)
            if done:
                jobs.popleft()
            if self._closed:
                _cancel(jobs)
                self._note_idle()
            elif jobs:
                self._jobs[session] = jobs
                self._change.notify()


def _slice_of(work: Work[Any], future: "Future[Any]") -> bool:
    """Do a slice; return whether it was the last one."""
    try:
        next(work)
    except StopIteration as done:
        future.set_result(done.value)
    except BaseException as exc:  # noqa: BLE001 - whoever waits for the future is to hear of it
        future.set_exception(exc)
    else:
        return False
    return True


def _cancel(jobs: "deque[_Job]") -> None:
    for work, future in jobs:
        work.close()
        future.cancel()
