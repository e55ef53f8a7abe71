"""Long work for several sessions in a few threads: a slice of one's, then a slice of another's.

So nobody's short work waits until another's long work is done, but for a slice. Knows nothing of
what the work is.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, TypeVar

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
    """Does what is asked of it: the work of one session in order, that of several in turn.

    All its threads are there from the start.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._change = threading.Condition()
        #: By session, that whose turn it is first. None of one of which a slice is being done.
        self._jobs: OrderedDict[int, deque[_Job]] = OrderedDict()
        self._busy: dict[int, deque[_Job]] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, session: int, work: Work[Result]) -> "Future[Result]":
        """Have it done, after all that was submitted for this session before."""
        future: Future[Result] = Future()
        with self._change:
            if self._closed:
                raise RuntimeError("closed")
            jobs = self._busy.get(session)
            if jobs is None:
                jobs = self._jobs.setdefault(session, deque())
            jobs.append((work, future))
            self._change.notify()
        return future

    def shutdown(self) -> None:
        """Do what was submitted, and end. Blocks."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            session, (work, future) = taken
            self._give_back(session, done=_slice_of(work, future))

    def _take(self) -> tuple[int, _Job] | None:
        """A job of the session whose turn it is; None when there is nothing more to come."""
        with self._change:
            self._change.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return None
            session, jobs = self._jobs.popitem(last=False)
            self._busy[session] = jobs
            return session, jobs[0]

    def _give_back(self, session: int, *, done: bool) -> None:
        with self._change:
            jobs = self._busy.pop(session)
            if done:
                jobs.popleft()
            if jobs:
                self._jobs[session] = jobs
                self._change.notify()


def _slice_of(work: Work[Any], future: "Future[Any]") -> bool:
    """Do a slice; whether it was the last one."""
    try:
        next(work)
    except StopIteration as done:
        future.set_result(done.value)
    except BaseException as exc:  # noqa: BLE001 - whoever waits for the future is to hear of it
        future.set_exception(exc)
    else:
        return False
    return True
