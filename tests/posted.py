"""The core and the daemon as one part of the daemon sees them: what it reports, for tests."""

import asyncio

from swapd.core.events import AnyEvent
from swapd.daemon.dispatch import Inbox

#: The time of all events.
NOW = 12.5


class Kept(Inbox):
    """An inbox that keeps the events, at the time `NOW`."""

    def __init__(self, posted: "Posted") -> None:
        super().__init__(asyncio.get_running_loop(), posted.crashes.put_nowait)
        self._events = posted.events

    def clock(self) -> float:
        return NOW

    def post(self, event: AnyEvent) -> None:
        self._events.put_nowait(event)


class Posted:
    """The events that a part posts, in order, and the errors with which it would end the daemon."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[AnyEvent] = asyncio.Queue()
        self.crashes: asyncio.Queue[BaseException] = asyncio.Queue()
        self.inbox = Kept(self)

    async def some(self, count: int) -> list[AnyEvent]:
        return [await self.events.get() for _ in range(count)]
