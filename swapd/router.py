"""The rpc channel: a ZeroMQ ROUTER that turns frames into requests, and replies back.

Decides nothing. A peer is who its routing id says, and that must begin with the token the
lifeline gave out: without a lifeline there is no session. A bad frame gets an error reply
and costs nobody anything.

No reply to a session is dropped. ZeroMQ keeps some for a peer that does not read; what it
refuses waits here, in order, and is tried again. When that is too much, or takes too long, the
session ends.
"""

import asyncio
import errno
import logging
import os
import time
from asyncio import Future
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from swapd.protocol import (
    NOT_A_MESSAGE,
    NOT_ENCODABLE,
    REQUEST_MAX_BYTES,
    TOKEN_BYTES,
    UNANSWERED_MAX,
    VERSION,
    AnyReply,
    AnyRequest,
    Refused,
    decode_request,
    encode,
)
from swapd.text import reason

log = logging.getLogger("swapd.router")

#: Replies kept for a session that does not read, beside those that ZeroMQ keeps: one that asks
#: no more than it may never has so many. Past either bound it ends.
UNREAD_MAX = UNANSWERED_MAX
UNREAD_MAX_BYTES = 64 << 20
#: How long a session with replies kept for it may take none of them.
UNREAD_S = 60.0
#: How often what is kept is tried again.
RETRY_S = 0.02
#: So many requests in a row are served before anything else has its turn.
TURN = 64


class _Unread:
    """Replies that the sockets of one session do not take: by peer, in order."""

    def __init__(self, now: float) -> None:
        self.waiting: dict[bytes, deque[bytes]] = {}
        self.count = 0
        self.nbytes = 0
        #: When it last took one.
        self.since = now

    def add(self, peer: bytes, data: bytes) -> None:
        self.waiting.setdefault(peer, deque()).append(data)
        self.count += 1
        self.nbytes += len(data)

    def flush(self, send: Callable[[bytes, bytes], bool], now: float) -> None:
        """Have `send(peer, data)` take what it takes."""
        for peer, waiting in list(self.waiting.items()):
            while waiting and send(peer, waiting[0]):
                self.count -= 1
                self.nbytes -= len(waiting.popleft())
                self.since = now
            if not waiting:
                del self.waiting[peer]

    def problem(self, now: float) -> str | None:
        """Why its session must end; None if it need not."""
        if self.count > UNREAD_MAX or self.nbytes > UNREAD_MAX_BYTES:
            return f"does not read: {self.count} replies unread, {self.nbytes} bytes"
        if now - self.since > UNREAD_S:
            return f"does not read: {self.count} replies unread, and none taken in {UNREAD_S:g} s"
        return None


class Router:
    """Serves requests of sessions that are open; answers the rest with a refusal."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        path: Path,
        on_request: Callable[[int, bytes, AnyRequest], None],
        on_deaf: Callable[[int, str], None],
    ) -> None:
        """Bind to `path`. Both are called on the loop.

        `on_request(session, peer, request)`. `on_deaf(session, why)`: it does not read, and is to
        be forgotten.
        """
        self._on_request = on_request
        self._on_deaf = on_deaf
        self._sessions: dict[bytes, int] = {}
        self._unread: dict[int, _Unread] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_MAX_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # say so rather than drop a reply
        self._socket.bind(f"ipc://{path}")
        os.chmod(path, 0o600)

    def open(self, token: bytes, session: int) -> None:
        self._sessions[token] = session

    def forget(self, token: bytes) -> None:
        session = self._sessions.pop(token, None)
        if session is not None:
            self._unread.pop(session, None)

    async def serve(self) -> None:
        """Receive until cancelled."""
        while True:
            for _ in range(TURN):
                self._received(await self._socket.recv_multipart())
            await asyncio.sleep(0)  # while requests are there, receiving them lets nobody else run

    def reply(self, peer: bytes, reply: AnyReply) -> None:
        """Send, now or as soon as the peer reads. To a peer that is gone nothing is sent, and to
        one that has no session no more than it reads.

        One that cannot be encoded is a refusal instead. After `close` it does nothing.
        """
        if not self._socket.closed:
            self._send(peer, _encoded(reply))

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._socket.close()

    def _send(self, peer: bytes, data: bytes) -> None:
        session = self._sessions.get(peer[:TOKEN_BYTES])
        if session is None:
            self._try(peer, data)
            return
        unread = self._unread.get(session)
        behind = unread is not None and peer in unread.waiting
        if not behind and self._try(peer, data):
            return
        now = time.monotonic()
        unread = self._unread.setdefault(session, _Unread(now))
        unread.add(peer, data)
        self._look_after(session, unread, now)

    def _try(self, peer: bytes, data: bytes) -> bool:
        """Whether the peer needs no more of it: it takes it, or is gone."""
        sent = cast("Future[Any]", self._socket.send_multipart([peer, data], zmq.NOBLOCK))
        error = sent.exception()  # it is done at once
        if error is None or getattr(error, "errno", 0) == errno.EHOSTUNREACH:
            return True
        if isinstance(error, zmq.Again):
            return False
        raise error

    def _try_again(self) -> None:
        self._retry = None
        now = time.monotonic()
        for session, unread in list(self._unread.items()):
            unread.flush(self._try, now)
            self._look_after(session, unread, now)

    def _look_after(self, session: int, unread: _Unread, now: float) -> None:
        if not unread.count:
            self._unread.pop(session, None)  # the end of another may have ended it too
        elif problem := unread.problem(now):
            self._on_deaf(session, problem)
        elif self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._try_again)

    def _received(self, frames: list[bytes]) -> None:
        peer, *rest = frames
        session = self._sessions.get(peer[:TOKEN_BYTES])
        if session is None:
            why = "this rpc connection belongs to no open lifeline; connect again"
            self.reply(peer, Refused(_request_id(rest), "no_session", why))
            return
        try:
            (payload,) = rest
            request = decode_request(payload)
        except NOT_A_MESSAGE as exc:
            log.warning("session %d sent garbage: %s", session, reason(exc))
            why = f"not a request of protocol {VERSION}: {reason(exc)}"
            self.reply(peer, Refused(_request_id(rest), "bad_request", why))
            return
        self._on_request(session, peer, request)


def _request_id(rest: list[bytes]) -> int:
    """The id in a request that cannot be served, if it has one, so that its sender hears."""
    try:
        raw = msgspec.msgpack.decode(rest[0])
    except (IndexError, *NOT_A_MESSAGE):
        return 0
    found = raw.get("id", 0) if isinstance(raw, dict) else 0
    return found if type(found) is int else 0


def _encoded(reply: AnyReply) -> bytes:
    try:
        return encode(reply)
    except NOT_ENCODABLE as exc:
        what = f"the answer ({type(reply).__name__}) cannot be sent: {exc}"
        log.error("%s", what)
        why = f"{what}. This is a mistake in swapd; its log says more, and others are served"
        return encode(Refused(reply.id, "internal", why))
