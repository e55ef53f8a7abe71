"""What each part of the daemon has of the rest: the loop, a clock, and the way to the core."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from swapd.core.events import AnyEvent


class Inbox:
    """Takes the events of all parts. Used in the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        post: Callable[[AnyEvent], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        """`clock` is that of all events. `post(event)` passes one to the core. `crashed(error)`
        ends the daemon, because of a bug or a device that cannot be trusted any more."""
        self.loop = loop
        self.clock = clock
        self.post = post
        self.crashed = crashed
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run `work` as a task, until `stop` at most. An error of it ends the daemon."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def stop(self) -> None:
        """Cancel all tasks. Calls of theirs that run in threads go on."""
        for task in list(self._tasks):
            task.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashed(error)
