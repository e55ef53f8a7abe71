"""Bounds for HTTP: connections, headers, times, and unread data.

uvicorn bounds the size of headers, but neither the time to send them nor the time without reading.
This module checks each connection once a second.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Most connections. One more replaces the one that has been idle longest.
CONNECTIONS_MAX = 200
#: Seconds that a connection may take to send a request, and to read an answer.
ASK_S = 10.0
READ_S = 10.0
HEADERS_MAX_BYTES = 16 << 10
LOOK_S = 1.0


class Guarded(H11Protocol):
    """One connection."""

    idle_since = 0.0
    #: Its unread bytes, and the time since which it has read none.
    unread = 0
    unread_since = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        there = [each for each in self.connections if isinstance(each, Guarded) and each.there]
        if len(there) > CONNECTIONS_MAX:
            idle = [each for each in there if each.idle]  # at least this one
            min(idle, key=lambda each: each.idle_since).transport.abort()

    @property
    def there(self) -> bool:
        """Whether it is open; its end is reported later."""
        return not self.transport.is_closing()

    @property
    def idle(self) -> bool:
        """Whether it has no request in progress."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def look(self) -> None:
        """End the connection if it takes too long."""
        now = self.loop.time()
        unread = self.transport.get_write_buffer_size()
        if not unread or not self.unread or unread < self.unread:
            self.unread_since = now
        self.unread = unread
        slow_to_ask = self.idle and now - self.idle_since > ASK_S
        if slow_to_ask or now - self.unread_since > READ_S:
            self.transport.abort()


class Server(uvicorn.Server):
    """Serves until it is told to end; the process handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def watch(self) -> None:
        """Check every connection, again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            for each in list(self.server_state.connections):
                if isinstance(each, Guarded):
                    each.look()


def server(app: Any) -> Server:
    """A server without a Server header and without an access log."""
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
