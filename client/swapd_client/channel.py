"""How a thread, or an event loop, carries requests: one ZeroMQ DEALER each.

A channel of its own keeps a thread's requests in order without a lock, and lets it wait
for its reply without a second thread: a round trip is two context switches, as on a bare
socket. Every wait ends when the session does.
"""

import asyncio
import itertools
import struct
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from swapd.protocol import NOT_A_MESSAGE, AnyReply, AnyRequest, Cancel, decode_reply, encode
from swapd_client.errors import AcquireTimeout, ClientClosed, SwapdError, VersionMismatch
from swapd_client.session import Session

#: How much longer than its own timeout a request waits for a daemon that does not answer.
GRACE_S = 5.0
#: How long what a thread said last may take to be sent once the thread has ended.
LAST_WORDS_MS = 1000
#: Longer timeouts are left to the daemon: a poll counts milliseconds in 32 bits.
POLL_MAX_S = 1e6


class ChannelFactory:
    """Makes channels of one session; closes what is left of them at the end."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.context = zmq.Context()
        self._numbers = itertools.count()

    def socket(self, context: "zmq.Context[Any]") -> Any:
        """A connected socket of `context`'s kind, blocking or awaited. Raises: ClientClosed."""
        try:
            socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as exc:
            raise ClientClosed(f"the client's connection is closed ({exc})") from exc
        identity = self.session.welcome.token + struct.pack(">I", next(self._numbers))
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self.session.welcome.rpc)
        return socket

    def close(self) -> None:
        self.context.destroy(linger=0)


class Channel:
    """Requests of one thread: one that it waits for, and any number that it does not."""

    #: None if the client was closed before it could be made.
    _socket: Any = None

    def __init__(self, factory: ChannelFactory) -> None:
        self._session = factory.session
        self._socket = factory.socket(factory.context)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._session.ended.fileno(), zmq.POLLIN)
        #: What was asked and not collected: the reply, once it has come.
        self._asked: dict[int, AnyReply | None] = {}

    def __del__(self) -> None:
        # what its thread gave back last is still on its way; nobody waits for it to be sent
        if self._socket is not None:
            self._socket.close(linger=LAST_WORDS_MS)

    def send(self, request: AnyRequest) -> None:
        """Send and forget. Never blocks; what a dead daemon misses does not matter."""
        try:
            self._socket.send(encode(request), zmq.NOBLOCK)
        except zmq.ZMQError:
            self._session.check()

    def call(self, request: AnyRequest, timeout_s: float | None = None) -> AnyReply:
        """Send and wait for the reply, a refusal included.

        Raises: what ended the session; AcquireTimeout if `timeout_s` and the grace pass.
        """
        try:
            self._socket.send(encode(request), zmq.NOBLOCK)
            return self._wait(request.id, timeout_s)
        except zmq.ZMQError as exc:
            self._session.check()
            raise ClientClosed(f"the client's connection is closed ({exc})") from exc
        except BaseException:
            self.send(Cancel(self._session.next_id(), request.id))
            raise

    def ask(self, request: AnyRequest) -> None:
        """Send, and have the reply kept for `collect`. Never blocks."""
        self._asked[request.id] = None
        self.send(request)

    def collect(self, request: int, within_s: float) -> AnyReply | None:
        """The reply to what was asked, a refusal included; None if it does not come within that.

        Raises: what ended the session.
        """
        self._session.check()
        try:
            while self._asked[request] is None:
                if not self._socket.poll(0) and not self._poll(within_s):
                    return None
                self._keep(_decode(self._socket.recv(zmq.NOBLOCK)))
        except zmq.ZMQError as exc:
            raise ClientClosed(f"the client's connection is closed ({exc})") from exc
        return self._asked.pop(request)

    def _poll(self, within_s: float) -> bool:
        """Wait for a reply; whether one is there. Raises: what ended the session."""
        ready = self._poller.poll(int(within_s * 1000))
        if ready and ready[0][0] is not self._socket:
            self._session.check()
        return bool(ready)

    def abandon(self, request: int) -> None:
        """What was asked is not wanted any more, also if it was granted by now. Never blocks."""
        self._asked.pop(request, None)
        self.send(Cancel(self._session.next_id(), request))

    def _keep(self, reply: AnyReply) -> None:
        if reply.id in self._asked:
            self._asked[reply.id] = reply  # else: late, for a wait that was given up

    def _wait(self, request: int, timeout_s: float | None) -> AnyReply:
        limit_ms = None
        if timeout_s is not None and timeout_s < POLL_MAX_S:
            limit_ms = int((timeout_s + GRACE_S) * 1000)
        while True:
            ready = self._poller.poll(limit_ms)
            if not ready:
                raise AcquireTimeout("the daemon does not answer; is it stopped or overloaded?")
            if ready[0][0] is not self._socket:
                self._session.check()
            reply = _decode(self._socket.recv(zmq.NOBLOCK))
            if reply.id == request:
                return reply
            self._keep(reply)


class AsyncChannel:
    """Requests of one event loop, any number at a time."""

    def __init__(self, factory: ChannelFactory) -> None:
        self._session = factory.session
        self._loop = asyncio.get_running_loop()
        context: zmq.asyncio.Context = zmq.asyncio.Context.shadow(factory.context.underlying)
        self._socket: zmq.asyncio.Socket = factory.socket(context)
        self._replies: dict[int, asyncio.Future[AnyReply]] = {}
        self._reader = self._loop.create_task(self._read(), name="swapd-replies")
        self._session.when_ended(self._ended)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket.close()

    def send(self, request: AnyRequest) -> None:
        """Send and forget. Never blocks."""
        self._socket.send(encode(request))

    async def call(self, request: AnyRequest, timeout_s: float | None = None) -> AnyReply:
        """Send and wait for the reply, a refusal included. Raises as `Channel.call`."""
        self._session.check()
        future: asyncio.Future[AnyReply] = self._loop.create_future()
        self._replies[request.id] = future
        self.send(request)
        limit_s = None if timeout_s is None else timeout_s + GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                return await future
        except TimeoutError as exc:
            self.send(Cancel(self._session.next_id(), request.id))
            raise AcquireTimeout("the daemon does not answer; is it stopped?") from exc
        except asyncio.CancelledError:
            self.send(Cancel(self._session.next_id(), request.id))
            raise
        finally:
            self._replies.pop(request.id, None)

    async def _read(self) -> None:
        while True:
            try:
                reply = _decode(await self._socket.recv())
            except VersionMismatch as exc:
                self._fail(exc)
                continue
            future = self._replies.get(reply.id)
            if future is not None and not future.done():
                future.set_result(reply)

    def _ended(self, error: SwapdError) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits there
            self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: SwapdError) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)


def _decode(data: bytes) -> AnyReply:
    try:
        reply: AnyReply = decode_reply(data)
    except NOT_A_MESSAGE as exc:
        raise VersionMismatch(
            f"the daemon answered what this client does not know ({exc}); "
            "install the same version of swapd on both sides"
        ) from exc
    return reply
