"""Connections of ZeroMQ sockets, without a thread and without libzmq. Knows no requests.

Serves a few messages of a peer at a time. Output that the kernel does not take waits here; the
owner of the peers limits it.
"""

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from swapd.daemon import zmtp
from swapd.daemon.door import Door

log = logging.getLogger("swapd.daemon.peers")

#: Messages of one peer to serve before other work has its turn.
TURN = 64
READ_BYTES = 64 << 10
BATCH_BYTES = 64 << 10
#: Most bytes of incomplete messages of all peers.
KEPT_MAX_BYTES = 64 << 20


class Peer:
    def __init__(self, sock: socket.socket, pid: int, server: "Peers") -> None:
        self.pid = pid
        #: Session number; 0 without a session.
        self.session = 0
        self.closed = False
        #: Its bytes in the server's count of incomplete messages.
        self.counted = 0
        self._sock = sock
        self._server = server
        self._loop = server.loop
        self._decoder = zmtp.Decoder(server.terms.kinds, server.terms.longest)
        #: The unsent rest of a message, and the messages behind it.
        self._rest = b""
        self._waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self._waits = False

    def greet(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self.take(zmtp.GREETING + zmtp.ready(self._server.terms.kind))

    def __repr__(self) -> str:
        return f"<Peer pid={self.pid} session={self.session}>"

    @property
    def identity(self) -> bytes:
        """Routing id; b"" before the handshake."""
        return self._decoder.identity or b""

    @property
    def behind(self) -> bool:
        return bool(self._rest or self._waiting)

    @property
    def waiting(self) -> int:
        """Number of messages of which the kernel has taken nothing."""
        return len(self._waiting)

    def fileno(self) -> int:
        return self._sock.fileno()

    def take(self, data: bytes) -> bool:
        """Give whole messages to the kernel; return False if it does not take them now. A closed
        peer takes all."""
        if self.closed:
            return True
        if self._rest:
            return False
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            self._wait()
            return False
        except OSError as exc:
            self.turn_out(f"cannot be sent to: {exc.strerror}")
            return True
        if sent < len(data):
            self._rest = data[sent:]
            self._wait()
        return True

    def send(self, data: bytes) -> bool:
        """Send a message now, or when the kernel takes more; return whether it was taken now."""
        if not self._waiting and self.take(data):
            return True
        self._waiting.append(data)
        self.waiting_bytes += len(data)
        return False

    def forget(self) -> None:
        self._waiting.clear()
        self.waiting_bytes = 0

    def turn_out(self, why: str) -> None:
        log.info("%r ended: %s", self, why)
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        # closing with unread bytes would lose messages that the other side has not read yet
        with suppress(OSError, MemoryError):
            self._sock.recv(READ_BYTES)
        self._sock.close()
        self._server.left(self)
        self.forget()

    def _readable(self) -> None:
        try:
            data = self._sock.recv(READ_BYTES)
            self._decoder.feed(data)
        except BlockingIOError:
            return
        except (OSError, MemoryError) as exc:
            self.turn_out(f"cannot be read: {exc}")
            return
        if data:
            self._serve()
        else:
            self.close()

    def _serve(self) -> None:
        try:
            for _ in range(TURN):
                if (message := self._next()) is None:
                    return
                self._server.received(self, message)
                if self.closed:
                    return
        except zmtp.WireError as exc:
            self.turn_out(str(exc))
        except Exception as exc:  # noqa: BLE001 - a bug in the daemon must end it, loudly
            self._server.crashed(exc)
        else:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_soon(self._go_on)

    def _next(self) -> list[bytes] | None:
        message = self._decoder.next()
        for answer in self._decoder.answers:
            self.take(answer)  # if not taken, the peer pings again
        self._decoder.answers.clear()
        if not self.session and self._decoder.identity is not None:
            self._server.greeted(self)
        if message is None:
            self._server.count(self, self._decoder.kept)
        return None if self.closed else message

    def _go_on(self) -> None:
        if not self.closed:
            self._loop.add_reader(self._sock.fileno(), self._readable)
            self._serve()

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._loop.add_writer(self._sock.fileno(), self.push)

    def push(self) -> None:
        try:
            self._rest = self._rest[self._sock.send(self._rest) :] if self._rest else b""
        except BlockingIOError:
            return
        except OSError as exc:
            self.turn_out(f"cannot be sent to: {exc.strerror}")
            return
        if not self._rest:
            self._waits = False
            self._loop.remove_writer(self._sock.fileno())
            waited = len(self._waiting)
            while self._waiting and self._take_some():
                pass
            if len(self._waiting) < waited:
                self._server.took(self)

    def _take_some(self) -> bool:
        """Give the first waiting messages to the kernel; return False if it does not take them
        now."""
        batch, nbytes = [], 0
        for data in self._waiting:
            batch.append(data)
            nbytes += len(data)
            if nbytes >= BATCH_BYTES:
                break
        if not self.take(b"".join(batch)):
            return False
        if not self.closed:
            for _ in batch:
                self._waiting.popleft()
            self.waiting_bytes -= nbytes
        return True


class SocketTerms(NamedTuple):
    """`kind`: this side's socket; `kinds`: sockets that may connect; `longest`: most bytes of a
    message."""

    kind: bytes
    kinds: Collection[bytes]
    longest: int


class Peers(ABC):
    """Accepts peers at a path, and closes those that stay without a session. A subclass serves
    messages, on the loop."""

    def __init__(
        self,
        path: Path,
        loop: asyncio.AbstractEventLoop,
        terms: SocketTerms,
        crashed: Callable[[BaseException], None],
    ) -> None:
        """`crashed(error)`: serving a message has failed."""
        self.loop = loop
        self.terms = terms
        self.crashed = crashed
        self._all: set[Peer] = set()
        #: Bytes of incomplete messages, of all peers.
        self._kept = 0
        self._door = Door(path, socket.SOCK_STREAM, loop, self._entered)

    @abstractmethod
    def greeted(self, peer: Peer) -> None:
        """Called after the handshake, and before each message of a peer without a session."""

    @abstractmethod
    def received(self, peer: Peer, frames: list[bytes]) -> None: ...

    def took(self, peer: Peer) -> None:  # noqa: B027 - a subclass need not care
        """Called when the peer has taken some of its waiting messages."""

    @abstractmethod
    def gone(self, peer: Peer) -> None:
        """Called when the peer is closed."""

    def _entered(self, sock: socket.socket, pid: int) -> None:
        peer = Peer(sock, pid, self)
        self._all.add(peer)
        self._door.enter(peer)
        peer.greet()

    def settle(self, peer: Peer, session: int) -> None:
        peer.session = session
        self._door.leave(peer)

    def unsettle(self, peer: Peer) -> None:
        """Make a peer of an ended session a guest, and drop its waiting replies."""
        peer.session = 0
        peer.forget()
        self._door.enter(peer)

    def count(self, peer: Peer, kept: int) -> None:
        """Count bytes of an incomplete message. If there are too many, turn out the peer with the
        most, of the process with the most."""
        self._kept += kept - peer.counted
        peer.counted = kept
        if self._kept > KEPT_MAX_BYTES:
            of: Counter[int] = Counter()
            for one in self._all:
                of[one.pid] += one.counted
            (pid, _), *_ = of.most_common(1)
            worst = max((one for one in self._all if one.pid == pid), key=lambda one: one.counted)
            worst.turn_out("its process has too many incomplete messages")

    def left(self, peer: Peer) -> None:
        self._kept -= peer.counted
        peer.counted = 0
        self._door.leave(peer)
        self._all.discard(peer)
        self.gone(peer)

    def close(self) -> None:
        self._door.close()
        for peer in list(self._all):
            peer.close()
