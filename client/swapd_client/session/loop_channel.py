"""How an event loop carries requests: any number at a time, on a ZeroMQ DEALER of its own.

Sending never blocks. The number of open requests is bounded, and so is the memory of messages that
a busy or stopped daemon has not read.
"""

import asyncio
from contextlib import suppress

import zmq.asyncio

from swapd.shared.protocol import UNANSWERED_MAX, AnyReply, AnyRequest, Cancel
from swapd_client.errors import InvalidArgument, SwapdError, VersionMismatch
from swapd_client.session.channel import GRACE_S, ChannelFactory
from swapd_client.session.wire import decode, encoded, unanswered


class AsyncChannel:
    """Requests of one event loop, any number at a time."""

    def __init__(self, factory: ChannelFactory) -> None:
        self._session = factory.session
        self._loop = asyncio.get_running_loop()
        context: zmq.asyncio.Context = zmq.asyncio.Context.shadow(factory.context)
        self._socket: zmq.asyncio.Socket = factory.socket(context)
        self._replies: dict[int, asyncio.Future[AnyReply]] = {}
        self._reader = self._loop.create_task(self._read(), name="swapd-replies")
        self._session.life.when_ended(self._ended)

    def end(self) -> None:
        """As `close`, without waiting for its reader: once the session has ended."""
        self._reader.cancel()
        self.close_socket()

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self.close_socket()

    def close_socket(self) -> None:
        """As `close`, after the loop has ended."""
        self._socket.close()

    def send(self, request: AnyRequest) -> None:
        """Send, and wait for no reply. Never blocks. Raises: InvalidArgument if it is too long."""
        data = encoded(request)
        if not self._socket.closed:
            self._socket.send(data)

    async def call(self, request: AnyRequest, timeout_s: float | None = None) -> AnyReply:
        """Send and wait for the reply. Raises as `Channel.call`; InvalidArgument for too many."""
        self._session.check()
        if len(self._replies) >= UNANSWERED_MAX:
            raise InvalidArgument(
                f"{UNANSWERED_MAX} requests of this client wait for their reply, the most allowed: "
                "wait for some of them, or cancel them"
            )
        self.send(request)
        future: asyncio.Future[AnyReply] = self._loop.create_future()
        self._replies[request.id] = future
        limit_s = None if timeout_s is None else timeout_s + GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError as exc:
            self.send(Cancel(self._session.next_id(), request.id))
            raise unanswered(self._session, request, limit_s or 0.0) from exc
        except asyncio.CancelledError:
            self.send(Cancel(self._session.next_id(), request.id))
            raise
        finally:
            self._replies.pop(request.id, None)

    async def _read(self) -> None:
        while True:
            try:
                reply = decode(await self._socket.recv())
            except VersionMismatch as exc:
                self._fail(exc)
                continue
            future = self._replies.get(reply.id)
            if future is not None and not future.done():
                future.set_result(reply)

    def _ended(self, error: SwapdError) -> None:
        with suppress(RuntimeError):  # the loop is closed, so no task waits there
            self._loop.call_soon_threadsafe(self._fail, error)
            self._loop.call_soon_threadsafe(self.end)

    def _fail(self, error: SwapdError) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)
