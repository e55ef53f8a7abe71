"""Bounds on what comes by HTTP: connections, headers, time, and what nobody reads.

uvicorn bounds the size of headers; how long they may take, and how long somebody may not read, it
does not. Once a second each connection is looked at.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Connections at a time. One more takes the place of the one that has been idle longest.
CONNECTIONS_MAX = 200
#: How long a connection may take to ask something, and to read what it was sent.
ASK_S = 10.0
READ_S = 10.0
HEADERS_MAX_BYTES = 16 << 10
LOOK_S = 1.0


class Guarded(H11Protocol):
    """One connection."""

    idle_since = 0.0
    #: How much it has not read, and since when it has read nothing.
    unread = 0
    unread_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        there = [each for each in self.connections if isinstance(each, Guarded) and each.there]
        if len(there) > CONNECTIONS_MAX:
            idle = [each for each in there if each.idle]  # this one, if no other
            min(idle, key=lambda each: each.idle_since).transport.abort()

    @property
    def there(self) -> bool:
        """Whether it has not ended; that it has is heard later."""
        return not self.transport.is_closing()

    @property
    def idle(self) -> bool:
        """Whether nothing is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def look(self) -> None:
        """End it if it takes too long."""
        now = self.loop.time()
        unread = self.transport.get_write_buffer_size()
        if not unread or not self.unread or unread < self.unread:
            self.unread_since = now
        self.unread = unread
        slow_to_ask = self.idle and now - self.idle_since > ASK_S
        if slow_to_ask or now - self.unread_since > READ_S:
            self.transport.abort()


class Server(uvicorn.Server):
    """Serves until it is told to end; signals are its process's own business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def watch(self) -> None:
        """Look at every connection, again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            for each in list(self.server_state.connections):
                if isinstance(each, Guarded):
                    each.look()


def server(app: Any) -> Server:
    """One that says nothing of itself, and writes no log of who comes."""
    return Server(
        uvicorn.Config(
            app,
            http=Guarded,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=HEADERS_MAX_BYTES,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
        )
    )
