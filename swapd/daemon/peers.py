"""Connections of ZeroMQ sockets, without a thread and without libzmq. Knows no requests.

What comes becomes messages, a few at a time, so that others have their turn; what goes is taken
by the kernel, or not: nothing is kept here but the rest of a message that it took in part.
"""

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from swapd.daemon import zmtp
from swapd.daemon.door import GUEST_S, Door, Guests

log = logging.getLogger("swapd.daemon.peers")

#: So many messages of one peer are served before anybody else has its turn.
TURN = 64
READ_BYTES = 64 << 10
#: Bytes of messages that are not complete, of all peers together.
KEPT_MAX_BYTES = 64 << 20


class Peer:
    """One connection. It is a guest until its server says otherwise."""

    def __init__(self, sock: socket.socket, pid: int, server: "Peers") -> None:
        self.pid = pid
        #: Of whom this is, 0 while it is nobody's.
        self.session = 0
        self.closed = False
        #: Bytes of it that its server counts.
        self.counted = 0
        self._sock = sock
        self._server = server
        self._loop = server.loop
        self._decoder = zmtp.Decoder(server.terms.kinds, server.terms.longest)
        self._rest = b""
        self._waits = False

    def greet(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self.take(zmtp.GREETING + zmtp.ready(self._server.terms.kind))

    def __repr__(self) -> str:
        return f"<Peer pid={self.pid} session={self.session}>"

    @property
    def identity(self) -> bytes:
        """Its routing id; b"" before it has said it."""
        return self._decoder.identity or b""

    @property
    def behind(self) -> bool:
        """Whether the kernel has taken a message in part."""
        return bool(self._rest)

    def fileno(self) -> int:
        return self._sock.fileno()

    def take(self, data: bytes) -> bool:
        """Have the kernel take `data`, whole messages; False if it does not just now.

        Then, and only then, `room` is called when it may. What is closed takes all.
        """
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

    def turn_out(self, why: str) -> None:
        """Close it, and say why in the log."""
        log.info("%r ended: %s", self, why)
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        # closed over bytes that nobody read, it would lose the other side what it was sent
        with suppress(OSError, MemoryError):
            self._sock.recv(READ_BYTES)
        self._sock.close()
        self._server.left(self)

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
        """Up to TURN messages; if there are more, read nothing until others had their turn."""
        try:
            for _ in range(TURN):
                message = self._decoder.next()
                if self._decoder.answers:
                    self._answer()
                if not self.session and self._decoder.identity is not None:
                    self._server.host.greeted(self)
                if message is None:
                    self._server.count(self, self._decoder.kept)
                if message is None or self.closed:
                    return
                self._server.host.received(self, message)
                if self.closed:
                    return
        except zmtp.WireError as exc:
            self.turn_out(str(exc))
        except Exception as exc:  # noqa: BLE001 - a bug in the daemon must end it, loudly
            self._server.crashed(exc)
        else:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self.closed:
            self._loop.add_reader(self._sock.fileno(), self._readable)
            self._serve()

    def _answer(self) -> None:
        answers, self._decoder.answers = self._decoder.answers, []
        for answer in answers:
            self.take(answer)  # or not: who does not read asks again

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._loop.add_writer(self._sock.fileno(), self.push)

    def push(self) -> None:
        """Have the kernel take what it did not, if it does now."""
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
            self._server.host.room(self)


class Terms(NamedTuple):
    """What connects to what: `kind` is this side's, `longest` the bytes of a message to it."""

    kind: bytes
    kinds: Collection[bytes]
    longest: int


class Host(Protocol):
    """Whose peers they are. All is called on the loop."""

    def greeted(self, peer: Peer) -> None:
        """It has said who it is; again before each message of one that is nobody's."""

    def received(self, peer: Peer, frames: list[bytes]) -> None: ...

    def room(self, peer: Peer) -> None:
        """It took nothing for a while, and does again."""

    def left(self, peer: Peer) -> None:
        """It is closed."""


class Peers:
    """Lets them in at a path; closes those that belong to nobody after a while."""

    def __init__(
        self,
        path: Path,
        loop: asyncio.AbstractEventLoop,
        terms: Terms,
        host: Host,
        crashed: Callable[[BaseException], None],
    ) -> None:
        """`crashed(error)`: the host failed in what it was called for."""
        self.loop = loop
        self.terms = terms
        self.host = host
        self.crashed = crashed
        self._all: set[Peer] = set()
        #: Bytes that peers have said in part.
        self._kept = 0
        self._guests = Guests(loop, GUEST_S)
        self._door = Door(path, socket.SOCK_STREAM, loop, self._entered, self._guests.make_room)

    def _entered(self, sock: socket.socket, pid: int) -> None:
        peer = Peer(sock, pid, self)
        self._all.add(peer)
        self._guests.enter(peer)
        peer.greet()

    def settle(self, peer: Peer, session: int) -> None:
        """It is a session's, and may stay."""
        peer.session = session
        self._guests.leave(peer)

    def tolerate(self, peer: Peer) -> None:
        """It is nobody's, and may stay while there is room for guests."""
        self._guests.stay(peer)

    def unsettle(self, peer: Peer) -> None:
        """It is nobody's any more, and may stay as long as a guest."""
        peer.session = 0
        self._guests.enter(peer)

    def count(self, peer: Peer, kept: int) -> None:
        """So many bytes of it wait for the rest of their message. Where there are too many of all,
        the peer goes that has most of those of the process that has most."""
        self._kept += kept - peer.counted
        peer.counted = kept
        if self._kept > KEPT_MAX_BYTES:
            of: Counter[int] = Counter()
            for one in self._all:
                of[one.pid] += one.counted
            (pid, _), *_ = of.most_common(1)
            worst = max((one for one in self._all if one.pid == pid), key=lambda one: one.counted)
            worst.turn_out("too many messages of its process are not complete")

    def left(self, peer: Peer) -> None:
        self._kept -= peer.counted
        peer.counted = 0
        self._guests.leave(peer)
        self._all.discard(peer)
        self.host.left(peer)

    def close(self) -> None:
        self._door.close()
        for peer in list(self._all):
            peer.close()
