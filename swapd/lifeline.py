"""The lifeline: one Unix SEQPACKET socket for each session. It is the session.

Lives here: peer credentials, the handshake, descriptors out, packets in, and EOF, which
means the worker is gone. May not live here: decisions. Nothing here blocks the loop: a
worker that does not read gets a bounded backlog, and then its session ends.
"""

import asyncio
import logging
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from swapd.fds import OwnedFd, recv_packet, send_packet
from swapd.protocol import (
    LIFELINE_MAX_BYTES,
    NOT_A_MESSAGE,
    TOKEN_BYTES,
    VERSION,
    Code,
    Dropped,
    FromClient,
    FromDaemon,
    Goodbye,
    Hello,
    Revoked,
    decode_from_client,
    encode,
)
from swapd.text import problem_with_text, reason

log = logging.getLogger("swapd.lifeline")

#: How long a connection may take to say hello.
HELLO_S = 5.0
#: Packets kept for a worker that does not read. Past that its session ends.
BACKLOG_MAX = 1024
#: How long to wait before accepting again when descriptors have run out.
ACCEPT_PAUSE_S = 1.0


class Lifeline:
    """One connection. A session from its hello to its end; `token` names it on rpc."""

    def __init__(self, sock: socket.socket, server: "LifelineServer") -> None:
        self.session = 0  # set by the hello
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.pid, self.uid, _ = struct.unpack("3i", _credentials(sock))
        self.sock = sock
        self._server = server
        self._loop = server.loop
        self._backlog: deque[tuple[bytes, tuple[OwnedFd, ...]]] = deque()
        self._hello = self._loop.call_later(HELLO_S, self._no_hello)
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    def __repr__(self) -> str:
        return f"<Lifeline session={self.session} pid={self.pid}>"

    @property
    def reads(self) -> bool:
        """Whether it has taken all it was sent."""
        return not self._backlog

    def send(self, message: FromDaemon, fds: Sequence[OwnedFd] = ()) -> None:
        """Send, now or as soon as the worker reads. Closes `fds` when they are sent."""
        if self.closed:
            _close(fds)
            return
        self._backlog.append((encode(message), tuple(fds)))
        if len(self._backlog) == 1:
            self._flush()
        elif len(self._backlog) > BACKLOG_MAX:
            self._server.drop(self, "fenced", f"does not read: {BACKLOG_MAX} messages unread")

    def close(self) -> None:
        """Close the socket; tell nobody."""
        if self.closed:
            return
        self.closed = True
        self._hello.cancel()
        self._loop.remove_reader(self.sock.fileno())
        self._loop.remove_writer(self.sock.fileno())
        for _, fds in self._backlog:
            _close(fds)
        self._backlog.clear()
        self.sock.close()

    def _flush(self) -> None:
        while self._backlog:
            data, fds = self._backlog[0]
            try:
                send_packet(self.sock, data, [fd.fileno() for fd in fds])
            except BlockingIOError:
                self._loop.add_writer(self.sock.fileno(), self._flush)
                return
            except OSError:
                break  # gone: the reader will see EOF
            self._backlog.popleft()
            _close(fds)
        self._loop.remove_writer(self.sock.fileno())

    def _readable(self) -> None:
        try:
            data, fds = recv_packet(self.sock, LIFELINE_MAX_BYTES)
        except BlockingIOError:
            return
        except (OSError, ValueError) as exc:
            self._server.drop(self, "bad_request", str(exc))
            return
        _close(fds)  # no message of a client carries any
        if not data:
            self._server.gone(self)
            return
        try:
            message = decode_from_client(data)
        except NOT_A_MESSAGE as exc:
            self._server.drop(self, "bad_request", f"not a lifeline message: {reason(exc)}")
            return
        if problem := _problem_with(message):
            self._server.drop(self, "bad_request", problem)
            return
        self._on_message(message)

    def _on_message(self, message: FromClient) -> None:
        if not isinstance(message, Hello):
            if self.session:
                self._server.received(self, message)
            else:
                self._server.drop(self, "bad_request", "the first message must be a hello")
        elif self.session:
            self._server.drop(self, "bad_request", "said hello twice")
        elif message.version != VERSION:
            self._server.drop(
                self,
                "version",
                f"client speaks protocol {message.version}, this daemon {VERSION}; "
                "install the same version of swapd on both sides",
            )
        else:
            self._hello.cancel()
            self._server.hello(self, message)

    def _no_hello(self) -> None:
        self._server.drop(self, "bad_request", f"no hello within {HELLO_S:g} s")


class LifelineServer:
    """Accepts lifelines, and reports what happens on them to three callables.

    `on_hello(lifeline, hello)`: a session may begin. `on_message(lifeline, message)`: of an
    open session. `on_gone(lifeline)`: an open session ended, for whatever reason; its
    socket is closed.
    """

    def __init__(
        self,
        path: Path,
        loop: asyncio.AbstractEventLoop,
        on_hello: Callable[[Lifeline, Hello], None],
        on_message: Callable[[Lifeline, FromClient], None],
        on_gone: Callable[[Lifeline], None],
    ) -> None:
        self.loop = loop
        self._on_hello = on_hello
        self._on_message = on_message
        self._on_gone = on_gone
        self._lifelines: set[Lifeline] = set()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self._sock.bind(str(path))
        os.chmod(path, 0o600)
        self._sock.listen(128)
        loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as exc:
            log.error("cannot accept (%s); again in %g s", exc.strerror, ACCEPT_PAUSE_S)
            self.loop.remove_reader(self._sock.fileno())
            self.loop.call_later(ACCEPT_PAUSE_S, self._resume)
            return
        sock.setblocking(False)
        lifeline = Lifeline(sock, self)
        self._lifelines.add(lifeline)
        if lifeline.uid != os.getuid():
            log.warning("refused process %d of user %d", lifeline.pid, lifeline.uid)
            self.drop(lifeline, "bad_request", "this daemon serves another user")

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self.loop.add_reader(self._sock.fileno(), self._accept)

    def hello(self, lifeline: Lifeline, message: Hello) -> None:
        self._on_hello(lifeline, message)

    def received(self, lifeline: Lifeline, message: FromClient) -> None:
        self._on_message(lifeline, message)

    def drop(self, lifeline: Lifeline, code: Code, why: str) -> None:
        """End a connection that did wrong; tell it why, if it still reads."""
        log.warning("%r ended: %s", lifeline, why)
        if lifeline.reads:
            lifeline.send(Goodbye(code, why))
        self.gone(lifeline)

    def gone(self, lifeline: Lifeline) -> None:
        if lifeline in self._lifelines:
            self._lifelines.discard(lifeline)
            lifeline.close()
            if lifeline.session:
                self._on_gone(lifeline)

    def close(self, code: Code, why: str) -> None:
        """Say goodbye to all, and stop."""
        self.loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for lifeline in list(self._lifelines):
            lifeline.send(Goodbye(code, why))
            lifeline.close()
        self._lifelines.clear()


def _problem_with(message: FromClient) -> str | None:
    match message:
        case Hello():
            return problem_with_text("the label", message.label)
        case Revoked():
            return problem_with_text("the name", message.name)
        case Dropped():
            return None


def _credentials(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))


def _close(fds: Sequence[OwnedFd]) -> None:
    for fd in fds:
        fd.close()
