"""Carries the requests of a thread, on a ZeroMQ DEALER of its own. For loops, see
`loop_channel.py`.

So requests stay in order without a lock, and the thread needs no second one to wait for its reply:
a round trip is two context switches. Every wait ends when the session does.

A socket keeps all messages that a busy or stopped daemon has not read. To bound their memory, a
thread waits now and then until the daemon has received them.
"""

import itertools
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import zmq

from swapd.shared.protocol import (
    AnyReply,
    AnyRequest,
    Cancel,
    Commit,
    Register,
    Unregister,
    encode,
)
from swapd.shared.runtime_dir import RPC
from swapd_client.errors import ClientClosed, SwapdError
from swapd_client.session.endpoint import need_descriptors, need_threads
from swapd_client.session.session import Session
from swapd_client.session.wire import decode, encoded, unanswered

T = TypeVar("T")

#: Of a socket and its connection, and of the first socket's context and threads.
CHANNEL_DESCRIPTORS = 10
#: One moves messages, one closes sockets.
ZMQ_THREADS = 2
#: Seconds beyond its timeout that a request waits for a silent daemon.
GRACE_S = 5.0
STILL_MS = 1000
#: Messages that a thread sends before it waits for the daemon.
UNHEARD_MAX = 512
#: A cancel does not end these, and until their reply the daemon refuses all else for the component.
_ANSWERED = Register | Commit | Unregister
#: A poll counts milliseconds in 32 bits.
POLL_MAX_S = 1e6


class Line:
    """A socket that one thread uses at a time, and that any thread may close.

    libzmq ends the process if two threads use or close a socket at once.
    """

    __slots__ = ("_closing", "_lock", "socket", "unheard", "users")

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        #: Requests that the daemon may not have received.
        self.unheard: list[AnyRequest] = []
        self._lock = threading.RLock()
        #: More than one if a signal handler interrupts a call.
        self.users = 0
        self._closing = False

    def run(self, use: "Callable[[zmq.Socket[bytes]], T]") -> T:
        """Return `use(socket)`. An interrupt at any instruction leaves the line free for others."""
        with self._lock:
            self.users += 1
            try:
                return use(self.socket)
            finally:
                self.users -= 1
                if self._closing and not self.users:
                    self.socket.close(linger=0)

    def close(self) -> bool:
        """Close the socket, after its user if there is one; a session's end makes users leave at
        once.

        Returns False in a signal handler that interrupts the user: the interrupted call then closes
        it.
        """
        with self._lock:
            if self.users:
                self._closing = True
                return False
            self.socket.close(linger=0)
            return True


class ChannelFactory:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.context = zmq.Context()
        #: Sockets connect, and reconnect, through the daemon's folder.
        self._folder = session.lifeline.folder.again()
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._closed = False
        self._has_threads = False
        self._lines: list[Line] = []
        #: Lines of ended threads, whose last messages may still be on their way; for new threads.
        self._left: list[Line] = []
        #: Has the `channel` of each thread.
        self._own = threading.local()

    def channel(self) -> "Channel":
        """Return this thread's channel. Keep it while answers are due."""
        channel: Channel | None = getattr(self._own, "channel", None)
        if channel is None:
            channel = self._own.channel = Channel(self)
        elif channel.is_in_use:
            channel = Channel(self)
        return channel

    def is_waiting(self) -> bool:
        """Whether the caller is a signal handler that interrupts a call on its thread's channel."""
        channel: Channel | None = getattr(self._own, "channel", None)
        return channel is not None and channel.is_in_use

    def take(self) -> Line:
        """Return a line for a thread, until `left`. Raises: ClientClosed, LimitReached."""
        with self._lock:
            if self._closed:
                raise ClientClosed("this client is closed; connect again")
            if self._left:
                return self._left.pop()
            line = Line(self.socket(self.context))
            self._lines.append(line)
            return line

    def unheard(self, beside: "Channel") -> list[AnyRequest]:
        """Return requests of other threads that one of this thread's channel may overtake."""
        with self._lock:
            others = [line for line in self._lines if line is not beside._line]
        return [request for line in others for request in line.unheard]

    def left(self, line: Line) -> None:
        self._left.append(line)

    def socket(self, context: "zmq.Context[Any]") -> Any:
        need_descriptors(CHANNEL_DESCRIPTORS, "a thread, or loop, that asks the daemon")
        if not self._has_threads:
            need_threads(ZMQ_THREADS, "ZeroMQ")
            self._has_threads = True  # they start with the first socket, and stay
        try:
            socket = context.socket(zmq.DEALER)
            identity = self.session.welcome.token + struct.pack(">I", next(self._numbers))
            socket.setsockopt(zmq.ROUTING_ID, identity)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)  # no limit: it would drop messages, or block for ever
            socket.connect(f"ipc://{self._folder.inside / RPC}")
            return socket
        except zmq.ZMQError as exc:
            raise ClientClosed(
                f"{self.session.endpoint}: this client's connection is closed ({exc}); connect "
                "again"
            ) from exc

    def close(self) -> None:
        """Close all lines and end libzmq's threads. May be repeated after an interrupt."""
        with self._lock:
            self._closed = True
            lines = self._lines.copy()
        if all([line.close() for line in lines]):
            with self._lock:
                # `term` would wait for a socket that an interrupt kept from becoming a line
                self.context.destroy(linger=0)
                self.session.life.ended.close()
                self._folder.close()
        # otherwise this is a signal handler, and the interrupted call closes its line


class Channel:
    """Requests of one thread: one that it waits for, and any number of others."""

    #: Absent if the client was closed first.
    _line: Line

    def __init__(self, factory: ChannelFactory) -> None:
        self._session = factory.session
        self._factory = factory
        self._line = factory.take()
        self._poller = zmq.Poller()
        self._line.run(self._register)
        #: Requests to `collect`, with their replies once these have come.
        self._asked: dict[int, AnyReply | None] = {}

    @property
    def is_in_use(self) -> bool:
        """Whether a signal handler interrupts a call, whose reply another call would take."""
        return self._line.users > 0

    def _register(self, socket: "zmq.Socket[bytes]") -> None:
        self._session.check()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._session.life.ended.fileno(), zmq.POLLIN)

    def __del__(self) -> None:
        if hasattr(self, "_line"):
            self._factory.left(self._line)

    def send(self, request: AnyRequest) -> None:
        """Send without waiting for a reply. A daemon that dies may miss it.

        Blocks once in UNHEARD_MAX messages until the daemon has received them, for GRACE_S at most.
        Raises: InvalidArgument if it is too long.
        """
        data = encoded(request)

        def send(socket: "zmq.Socket[bytes]") -> None:
            self._line.unheard.append(request)  # first: an interrupt may come in between
            socket.send(data, zmq.NOBLOCK)
            if len(self._line.unheard) >= UNHEARD_MAX:
                self._be_heard(socket)

        try:
            self._line.run(send)
        except zmq.ZMQError:
            self._session.check()

    def _be_heard(self, socket: "zmq.Socket[bytes]") -> None:
        """Wait for the reply to a harmless request, which comes after all other replies."""
        self._line.unheard.clear()
        harmless = self._session.harmless()
        socket.send(encode(harmless), zmq.NOBLOCK)
        with suppress(SwapdError):  # the next request raises it; the socket keeps the messages
            self._wait(socket, harmless, 0.0)

    def call(
        self,
        request: AnyRequest,
        timeout_s: float | None = None,
        *,
        in_place_of: int | None = None,
        still_waits: Callable[[], None] | None = None,
    ) -> AnyReply:
        """Send and wait for the reply, which may be a refusal.

        `in_place_of` is an earlier request, abandoned once the daemon has this one. `still_waits`
        is called every STILL_MS, and when the reply to an `ask` comes. It may raise, and make
        requests.

        Raises: the error that ended the session; Timeout after `timeout_s` and the grace;
        InvalidArgument if the request is too long.
        """
        data, sent = encoded(request), len(self._line.unheard)

        def call(socket: "zmq.Socket[bytes]") -> AnyReply:
            self._session.check()  # another thread may have closed the socket
            socket.send(data, zmq.NOBLOCK)
            if in_place_of is not None:
                self._asked.pop(in_place_of, None)
                socket.send(encode(Cancel(self._session.next_id(), in_place_of)), zmq.NOBLOCK)
            return self._wait(socket, request, timeout_s, still_waits)

        try:
            reply = self._line.run(call)
            del self._line.unheard[:sent]  # a signal handler may have sent more
            return reply
        except BaseException:
            if isinstance(request, _ANSWERED):
                with suppress(SwapdError, zmq.ZMQError):
                    self._line.run(lambda socket: self._wait(socket, request, 0.0))
            else:
                self.send(Cancel(self._session.next_id(), request.id))
            raise
        finally:
            self._asked.pop(request.id, None)

    def ask(self, request: AnyRequest) -> None:
        """Send, and keep the reply for `collect`. Blocks and raises as `send`."""
        self._asked[request.id] = None
        try:
            self.send(request)
        except BaseException:
            del self._asked[request.id]
            raise

    def collect(self, request: int, within_s: float) -> AnyReply | None:
        """Return the reply to an `ask`, perhaps a refusal; None if it is late, or lost by an
        interrupt.

        Raises: the error that ended the session.
        """

        def collect(socket: "zmq.Socket[bytes]") -> AnyReply | None:
            self._session.check()
            while (reply := self._asked.get(request)) is None:
                if not socket.poll(0) and not self._poll(within_s):
                    return None
                self._keep(decode(socket.recv(zmq.NOBLOCK)))
            del self._asked[request]
            return reply

        return self._line.run(collect)

    def drop(self, request: int) -> None:
        """Forget an `ask` that has changed nothing."""
        self._asked.pop(request, None)

    def _poll(self, within_s: float) -> bool:
        ready = self._poller.poll(int(min(within_s, POLL_MAX_S) * 1000))
        if ready and ready[0][0] is not self._line.socket:
            self._session.check()
        return bool(ready)

    def abandon(self, request: int) -> None:
        """Cancel an `ask`, even if it was granted meanwhile. Blocks as `send`."""
        self._asked.pop(request, None)
        self.send(Cancel(self._session.next_id(), request))

    def _keep(self, reply: AnyReply) -> None:
        if reply.id in self._asked:
            self._asked[reply.id] = reply  # else it is late: its wait was given up

    def _wait(
        self,
        socket: "zmq.Socket[bytes]",
        request: AnyRequest,
        timeout_s: float | None,
        still_waits: Callable[[], None] | None = None,
    ) -> AnyReply:
        limit_ms = _limit_ms(timeout_s)
        while (kept := self._asked.get(request.id)) is None:
            ready = self._ready(limit_ms, request.id, still_waits)
            if ready is None:
                continue
            if not ready:
                raise unanswered(self._session, request, (limit_ms or 0) / 1000)
            if ready[0][0] is not socket:
                self._session.check()
            reply = decode(socket.recv(zmq.NOBLOCK))
            if reply.id == request.id:
                return reply
            self._keep(reply)
            if still_waits is not None and reply.id in self._asked:
                self._look(request.id, still_waits)
        return kept

    def _look(self, request: int, still_waits: Callable[[], None]) -> None:
        """Call `still_waits`, which may receive the reply to `request`: keep that reply."""
        self._asked.setdefault(request, None)
        still_waits()

    def _ready(
        self, limit_ms: int | None, request: int, still_waits: Callable[[], None] | None
    ) -> list[tuple[Any, int]] | None:
        """Return sockets with a message; [] after `limit_ms`; None if the reply is kept already."""
        waited_ms = 0
        while still_waits is not None and (limit_ms is None or waited_ms + STILL_MS < limit_ms):
            if ready := self._poller.poll(STILL_MS):
                return ready
            self._look(request, still_waits)
            waited_ms += STILL_MS
            if self._asked[request] is not None:
                return None
        return self._poller.poll(limit_ms and limit_ms - waited_ms)


def _limit_ms(timeout_s: float | None) -> int | None:
    if timeout_s is None or timeout_s >= POLL_MAX_S:
        return None
    return int((timeout_s + GRACE_S) * 1000)
