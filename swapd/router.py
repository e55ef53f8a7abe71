"""The rpc channel: a ZeroMQ ROUTER that turns frames into requests, and replies back.

Decides nothing. A peer is who its routing id says, and that must begin with the token the
lifeline gave out: without a lifeline there is no session. A bad frame gets an error reply
and costs nobody anything.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from swapd.protocol import (
    NOT_A_MESSAGE,
    NOT_ENCODABLE,
    TOKEN_BYTES,
    VERSION,
    AnyReply,
    AnyRequest,
    Refused,
    decode_request,
    encode,
)

log = logging.getLogger("swapd.router")

MESSAGE_MAX_BYTES = 1 << 20


class Router:
    """Serves requests of sessions that are open; answers the rest with a refusal."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        path: Path,
        on_request: Callable[[int, bytes, AnyRequest], None],
    ) -> None:
        """Bind to `path`. `on_request(session, peer, request)` is called on the loop."""
        self._on_request = on_request
        self._sessions: dict[bytes, int] = {}
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_MAX_BYTES)
        self._socket.bind(f"ipc://{path}")
        os.chmod(path, 0o600)

    def open(self, token: bytes, session: int) -> None:
        self._sessions[token] = session

    def forget(self, token: bytes) -> None:
        self._sessions.pop(token, None)

    async def serve(self) -> None:
        """Receive until cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            self._received(frames)

    def reply(self, peer: bytes, reply: AnyReply) -> None:
        """Send; a peer that is gone or does not read loses its reply, nobody else does.

        One that cannot be encoded is a refusal instead. After `close` it does nothing.
        """
        if not self._socket.closed:
            self._socket.send_multipart([peer, _encoded(reply)])

    def close(self) -> None:
        self._socket.close()

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
            log.warning("session %d sent garbage: %s", session, exc)
            why = f"not a request of protocol {VERSION}: {exc}"
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
