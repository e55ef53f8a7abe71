"""The core and the daemon as one part of the daemon sees them: what it reports, for tests."""

import asyncio

from swapd.core.events import AnyEvent
from swapd.daemon.inbox import Inbox

#: The time of all events.
NOW = 12.5


class Posted:
    """The events that a part posts, in order, and the errors with which it would end the daemon."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[AnyEvent] = asyncio.Queue()
        self.crashes: asyncio.Queue[BaseException] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.inbox = Inbox(loop, lambda: NOW, self.events.put_nowait, self.crashes.put_nowait)

    async def some(self, count: int) -> list[AnyEvent]:
        return [await self.events.get() for _ in range(count)]
