"""Carries the requests of an event loop: any number at a time, on a ZeroMQ DEALER of its own.

Sending never blocks. The number of open requests is bounded, and with it the memory of messages
that a busy or stopped daemon has not read. Ctrl-C may raise KeyboardInterrupt out of the loop at
any instruction, and the loop may run again. So no task reads replies: an interrupt would end it.
"""

import asyncio
from contextlib import suppress

import zmq

from swapd.shared.protocol import UNANSWERED_MAX, AnyReply, AnyRequest, Cancel
from swapd_client.errors import InvalidArgument, SwapdError, VersionMismatch
from swapd_client.interrupts import covered
from swapd_client.session.channel import GRACE_S, ChannelFactory
from swapd_client.session.wire import decode, encoded, unanswered


class AsyncChannel:
    def __init__(self, factory: ChannelFactory) -> None:
        self._session = factory.session
        self._loop = asyncio.get_running_loop()
        self._socket = factory.socket(zmq.Context.shadow(factory.context))
        self._fd = self._socket.getsockopt(zmq.FD)
        self._replies: dict[int, asyncio.Future[AnyReply]] = {}
        #: Whether a reply was taken from the socket, and not yet given to its request.
        self._has_one = False
        self._loop.add_reader(self._fd, self._read)
        self._session.life.when_ended(self._ended)

    async def close(self) -> None:
        self.close_socket()

    def close_socket(self) -> None:
        """As `close`, even after the loop has ended."""
        if not self._socket.closed:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self._fd)
            self._socket.close()

    def send(self, request: AnyRequest) -> None:
        """Send. Never blocks. Raises: InvalidArgument if the message is too long."""
        data = encoded(request)
        if not self._socket.closed:
            # libzmq's descriptor does not signal a reply that arrives during a send
            self._loop.call_soon(self._read)
            self._socket.send(data, zmq.NOBLOCK)

    async def call(self, request: AnyRequest, timeout_s: float | None = None) -> AnyReply:
        """Send and wait for the reply.

        Raises: as `Channel.call`; InvalidArgument if too many requests are open.
        """
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

    @covered
    def _read(self) -> None:
        """Hand over all replies. After an interrupt this is done again."""
        try:
            while not self._socket.closed and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                self._has_one = True
                self._hand_over(self._socket.recv(zmq.NOBLOCK))
                self._has_one = False
        except (KeyboardInterrupt, SystemExit):
            self._loop.call_soon(self._read)
            if self._has_one:
                self._has_one = False
                self._fail(
                    SwapdError(
                        "an interrupt lost an answer of the daemon, perhaps the one to this "
                        "request: make it again"
                    )
                )
            raise

    def _hand_over(self, data: bytes) -> None:
        try:
            reply = decode(data)
        except VersionMismatch as exc:
            return self._fail(exc)
        future = self._replies.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    def _ended(self, error: SwapdError) -> None:
        with suppress(RuntimeError):  # the loop is closed, so no task waits there
            self._loop.call_soon_threadsafe(self._fail, error)
            self._loop.call_soon_threadsafe(self.close_socket)

    def _fail(self, error: SwapdError) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)
