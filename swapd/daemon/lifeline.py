"""The lifeline: one Unix SEQPACKET socket per session. Its EOF means that the worker is gone.

A connection is a session from its hello on, and a guest before (`swapd.daemon.door`). Nothing here
blocks the loop.

`Hurry` and `Wanted` are state: a worker that reads late gets only the newest of each, so contention
never ends a slow session. Answers to requests wait until it reads; the core decides when it is
late.
"""

import asyncio
import logging
import secrets
import select
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from swapd.daemon.door import Door
from swapd.device import DeviceError
from swapd.shared.fds import EXHAUSTED, OwnedFd, has_room, recv_packet, send_packet
from swapd.shared.protocol import (
    LIFELINE_MAX_BYTES,
    NOT_A_MESSAGE,
    OLDEST,
    TOKEN_BYTES,
    VERSION,
    Code,
    Dropped,
    FromClient,
    FromDaemon,
    Goodbye,
    HandBack,
    Hello,
    Hurry,
    ReleaseKept,
    Revoke,
    Revoked,
    Saved,
    SessionUnmapped,
    Wanted,
    decode_from_client,
    encode,
)
from swapd.shared.text import problem_with_text, reason

log = logging.getLogger("swapd.daemon.lifeline")

#: A worker with so many unread packets gets no new host copies.
UNREAD_MAX = 1024
#: Host copies of earlier daemons that may wait for their Register; as many descriptors stay free.
HANDED_BACK_MAX = 64
#: Packets to read at most for one that was sent before a request.
READ_MAX = 1024
RETRY_S = 0.05

#: Opens descriptors for a packet. Raises: OSError, DeviceError.
Export = Callable[[], list[OwnedFd]]


class _Packet(NamedTuple):
    data: bytes
    fds: tuple[OwnedFd, ...]
    export: Export | None
    #: Whether no later packet can replace it.
    once: bool


class Lifeline:
    """One connection. `token` identifies its session on the rpc socket."""

    def __init__(self, sock: socket.socket, pid: int, server: "LifelineServer") -> None:
        self.session = 0  # set by the hello
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.pid = pid
        self.sock = sock
        self._server = server
        self._loop = server.loop
        #: Messages that the worker must get, in order. A newer `Revoke` or `Saved` of a component
        #: replaces the older one.
        self._backlog: OrderedDict[object, _Packet] = OrderedDict()
        #: Number of these that are `once`.
        self._once = 0
        #: Unsent hints by subject, and the subjects whose last sent hint was true.
        self._hints: dict[object, Hurry | Wanted] = {}
        self._heard: set[object] = set()
        self._room = select.poll()
        self._room.register(sock.fileno(), select.POLLOUT)
        #: Whether the loop watches for room in the socket.
        self._waits = False
        #: Host copies of earlier daemons, by the request that they are for.
        self._handed_back: dict[int, OwnedFd] = {}
        self._retry: asyncio.TimerHandle | None = None
        #: Last reported reason for unsent messages; and whether the worker has taken some since.
        self._kept: Literal["", "unread", "unsent"] = ""
        self._took = False
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    def __repr__(self) -> str:
        return f"<Lifeline session={self.session} pid={self.pid}>"

    @property
    def unread(self) -> int:
        return len(self._backlog)

    def send(
        self, message: FromDaemon, fds: Sequence[OwnedFd] = (), export: Export | None = None
    ) -> None:
        """Send now, or as soon as the worker reads. Closes `fds` when sent. `export` opens more
        just before sending, so that a waiting packet holds no descriptors."""
        if self.closed:
            _close(fds)
        elif isinstance(message, Hurry | Wanted):
            self._hint(message)
        else:
            self._keep(message, tuple(fds), export)
        if not (self.closed or self._waits or self._retry):
            self._flush()

    def last_words(self, message: Goodbye) -> None:
        """Send `message` if there is room, and close the connection."""
        if not self.closed:
            self._keep(message)
            with suppress(DeviceError, OSError):
                while self._backlog:
                    self._send_first()
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self.sock.fileno())
        self._loop.remove_writer(self.sock.fileno())
        self._forget()
        _close(tuple(self._handed_back.values()))
        self._handed_back.clear()
        self.sock.close()

    def take_handed_back(self, request: int) -> OwnedFd | None:
        """Return the host copy handed back for a request, which the caller owns."""
        for _ in range(READ_MAX):  # sent before the request, on another channel
            if self.closed or not self._readable():
                break
        return self._handed_back.pop(request, None)

    def _hint(self, hint: Hurry | Wanted) -> None:
        about, waits = (None, hint.waits) if isinstance(hint, Hurry) else (hint.name, hint.wanted)
        if waits == (about in self._heard):
            self._hints.pop(about, None)
        else:
            self._hints[about] = hint

    def _keep(
        self, message: FromDaemon, fds: tuple[OwnedFd, ...] = (), export: Export | None = None
    ) -> None:
        key, once = object(), True
        if isinstance(message, Revoke | Saved):
            key, once = (type(message), message.name), False
            self._backlog.pop(key, None)  # the newest comes after what was said before it
        self._once += once
        self._backlog[key] = _Packet(encode(message), fds, export, once)

    def _flush(self) -> None:
        self._retry = None
        try:
            while self._backlog:
                self._send_first()
            while self._hints and self._has_room():
                self._send_hint()
        except BlockingIOError:
            pass
        except (DeviceError, OSError) as exc:
            if isinstance(exc, DeviceError) or exc.errno in EXHAUSTED:
                return self._try_later(exc)
            self._forget()  # the reader will see EOF
        self._wait_for_room(waits=bool(self._backlog or self._hints))
        self._report("unread" if self._once else "")

    def _send_first(self) -> None:
        key, packet = next(iter(self._backlog.items()))
        self._send(packet)
        del self._backlog[key]
        _close(packet.fds)
        self._once -= packet.once
        self._took = True

    def _send_hint(self) -> None:
        about, hint = next(iter(self._hints.items()))
        send_packet(self.sock, encode(hint))
        del self._hints[about]
        self._heard ^= {about}

    def _has_room(self) -> bool:
        """Most of the socket's buffer must be free: the rest is not for hints."""
        return bool(self._room.poll(0))

    def _wait_for_room(self, *, waits: bool) -> None:
        if waits and not self._waits:
            self._loop.add_writer(self.sock.fileno(), self._flush)
        elif self._waits and not waits:
            self._loop.remove_writer(self.sock.fileno())
        self._waits = waits

    def _report(self, kept: Literal["", "unread", "unsent"], error: str = "") -> None:
        changed = kept != self._kept or (bool(kept) and self._took)
        self._kept, self._took = kept, False
        if changed and self.session and not self.closed:
            self._server.on_unread(self, max(self.unread, 1) if kept else 0, error)

    def _forget(self) -> None:
        for packet in self._backlog.values():
            _close(packet.fds)
        self._backlog.clear()
        self._hints.clear()
        self._once = 0

    def _send(self, packet: _Packet) -> None:
        opened = packet.export() if packet.export is not None else []
        try:
            send_packet(self.sock, packet.data, [fd.fileno() for fd in (*packet.fds, *opened)])
        finally:
            _close(opened)

    def _try_later(self, error: Exception) -> None:
        """Retry: the machine lacks something, which is not the worker's fault."""
        self._wait_for_room(waits=False)
        if self._kept != "unsent":
            log.warning("%r has to wait: %s", self, error)
        self._retry = self._loop.call_later(RETRY_S, self._flush)
        self._report("unsent", str(error))

    def _readable(self) -> bool:
        """Handle the next packet or the end; return False if there is neither."""
        try:
            data, files = recv_packet(self.sock, LIFELINE_MAX_BYTES, most=1)
        except (BlockingIOError, MemoryError):
            return False
        except (OSError, ValueError) as exc:
            self._server.drop(self, "bad_request", str(exc))
            return True
        try:
            if data:
                self._decode(data, files)
            else:
                self._server.gone(self)
        finally:
            _close(files)
        return True

    def _decode(self, data: bytes, files: list[OwnedFd]) -> None:
        try:
            message = decode_from_client(data)
        except NOT_A_MESSAGE as exc:
            self._server.drop(self, "bad_request", f"not a lifeline message: {reason(exc)}")
            return
        if problem := _problem_with(message, files):
            self._server.drop(self, "bad_request", problem)
        elif isinstance(message, HandBack) and self.session:
            self._keep_handed_back(message.request, files.pop())
        else:
            self._on_message(message)

    def _keep_handed_back(self, request: int, file: OwnedFd) -> None:
        held = self._handed_back
        roomy = len(held) < HANDED_BACK_MAX and has_room(file.fileno(), spare=HANDED_BACK_MAX)
        if roomy and request not in held:
            held[request] = file
        else:  # the worker fills a new host copy
            file.close()

    def _on_message(self, message: FromClient) -> None:
        if isinstance(message, SessionUnmapped):
            self._server.on_message(self, message)
            self._server.gone(self)
        elif not isinstance(message, Hello):
            if self.session:
                self._server.on_message(self, message)
            else:
                self._server.drop(self, "bad_request", "the first message must be a hello")
        elif self.session:
            self._server.drop(self, "bad_request", "said hello twice")
        elif not OLDEST <= message.version <= VERSION:
            self._server.drop(
                self,
                "version",
                f"client speaks protocol {message.version}, this daemon {OLDEST} to {VERSION}; "
                "install the same version of swapd on both sides, then `swapd upgrade`",
            )
        else:
            self._server.hello(self, message)

    def turn_out(self, why: str) -> None:
        self._server.drop(self, "bad_request", f"no hello: {why}")


class LifelineServer:
    """Accepts lifelines, and reports to four callables.

    `on_hello(lifeline, hello)`: a session may begin. `on_message(lifeline, message)`: of an open
    session, or a SessionUnmapped. `on_unread(lifeline, count, error)`: messages wait, and the
    worker reads no more for now or `error` is why they cannot be sent; with 0, it has taken all.
    `on_gone(lifeline)`: an open session has ended, and its socket is closed.
    """

    def __init__(
        self,
        path: Path,
        loop: asyncio.AbstractEventLoop,
        on_hello: Callable[[Lifeline, Hello], None],
        on_message: Callable[[Lifeline, FromClient], None],
        on_unread: Callable[[Lifeline, int, str], None],
        on_gone: Callable[[Lifeline], None],
    ) -> None:
        self.loop = loop
        self._on_hello = on_hello
        self.on_message = on_message
        self.on_unread = on_unread
        self._on_gone = on_gone
        self._lifelines: set[Lifeline] = set()
        self._door = Door(path, socket.SOCK_SEQPACKET, loop, self._entered, _refuse)

    def _entered(self, sock: socket.socket, pid: int) -> None:
        lifeline = Lifeline(sock, pid, self)
        self._lifelines.add(lifeline)
        self._door.enter(lifeline)

    def hello(self, lifeline: Lifeline, message: Hello) -> None:
        self._door.leave(lifeline)
        self._on_hello(lifeline, message)

    def drop(self, lifeline: Lifeline, code: Code, why: str) -> None:
        log.warning("%r ended: %s", lifeline, why)
        lifeline.last_words(Goodbye(code, why))
        self.gone(lifeline)

    def gone(self, lifeline: Lifeline) -> None:
        if lifeline in self._lifelines:
            self._lifelines.discard(lifeline)
            self._door.leave(lifeline)
            lifeline.close()
            if lifeline.session:
                self._on_gone(lifeline)

    def close(self, code: Code, why: str) -> None:
        self._door.close()
        for lifeline in list(self._lifelines):
            lifeline.last_words(Goodbye(code, why))
        self._lifelines.clear()


def _problem_with(message: FromClient, files: Sequence[OwnedFd]) -> str | None:
    match message:
        case HandBack():
            return None if files else "a host copy is handed back without its descriptor"
        case Hello():
            return problem_with_text("the label", message.label)
        case Revoked():
            return problem_with_text("the name", message.name)
        case Dropped() | ReleaseKept() | SessionUnmapped():
            return None


def _refuse(sock: socket.socket, code: Code, why: str) -> None:
    with suppress(OSError):
        send_packet(sock, encode(Goodbye(code, why)))


def _close(fds: Sequence[OwnedFd]) -> None:
    for fd in fds:
        fd.close()
