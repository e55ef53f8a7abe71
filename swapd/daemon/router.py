"""The daemon's two ZeroMQ sockets: requests with their replies, and the swap log as a stream.

A peer's routing id begins with its session's token, which only the lifeline gives out. Other peers
are refused, and closed after a while. No reply to a session is dropped: unread replies wait, in
order, and are reported. If there are too many, the session ends.

The publisher never waits. A slow subscriber misses records beyond a limit, and later learns how
many.
"""

import asyncio
import logging
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from swapd.daemon import zmtp
from swapd.daemon.peers import Peer, Peers, SocketTerms
from swapd.log.records import missed
from swapd.shared.fds import share
from swapd.shared.protocol import (
    NOT_A_MESSAGE,
    NOT_ENCODABLE,
    REQUEST_MAX_BYTES,
    TOKEN_BYTES,
    UNANSWERED_MAX,
    VERSION,
    AnyReply,
    AnyRequest,
    Code,
    Refused,
    decode_request,
    encode,
)
from swapd.shared.text import reason

log = logging.getLogger("swapd.daemon.router")

#: Limits of unread replies of one session, beside those in the kernel. A session within its limit
#: of requests never exceeds them.
UNREAD_MAX = UNANSWERED_MAX
UNREAD_MAX_BYTES = 64 << 20
#: Connections of one session, and their share of all descriptors. A client has one for each
#: requesting thread.
PEERS_MAX = 512
PEERS_SHARE = 10

_RPC_TERMS = SocketTerms(b"ROUTER", (b"DEALER", b"ROUTER"), REQUEST_MAX_BYTES)


class Router(Peers):
    """Serves requests of open sessions; refuses others."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: Path,
        on_request: Callable[[int, Peer, AnyRequest], None],
        on_unread: Callable[[int, int], None],
        on_deaf: Callable[[int, str], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        """Listen at `path`. All callables are called on the loop.

        `on_request(session, peer, request)`. `on_unread(session, count)`: replies wait, and the
        session takes no more for now; with 0, it has taken all. `on_deaf(session, why)`: no more
        can be kept, and the session must be forgotten. `crashed(error)`: one of these failed.
        """
        super().__init__(path, loop, _RPC_TERMS, crashed)
        self._on_request = on_request
        self._on_unread = on_unread
        self._on_deaf = on_deaf
        self._sessions: dict[bytes, int] = {}
        #: The peers of each session.
        self._of: dict[int, set[Peer]] = {}
        #: Sessions with waiting replies.
        self._behind: set[int] = set()
        self._closed = False

    def open(self, token: bytes, session: int) -> None:
        self._sessions[token] = session
        self._of[session] = set()

    def forget(self, token: bytes) -> None:
        """Make the peers of a session guests, and drop their unread replies."""
        session = self._sessions.pop(token, None)
        if session is not None:
            self._behind.discard(session)
            for peer in self._of.pop(session):
                self.unsettle(peer)

    def reply(self, peer: Peer, reply: AnyReply) -> None:
        """Send now, or as soon as the peer reads; a peer without a session gets only what it reads
        now. A reply that cannot be encoded becomes a refusal. No-op after `close`, and for a closed
        peer."""
        if not self._closed:
            self._send(peer, zmtp.frame(_encoded(reply)))

    def close(self) -> None:
        self._closed = True
        super().close()

    # --- of the peers --------------------------------------------------------------------

    def greeted(self, peer: Peer) -> None:
        session = self._sessions.get(peer.identity[:TOKEN_BYTES])
        if session is not None and len(self._of[session]) < share(PEERS_MAX, PEERS_SHARE):
            self._of[session].add(peer)
            self.settle(peer, session)

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        if not peer.session:
            code, why = self._why_not(peer)
            self.reply(peer, Refused(_request_id(frames), code, why))
            return
        try:
            (payload,) = frames
            request = decode_request(payload)
        except NOT_A_MESSAGE as exc:
            log.warning("session %d sent garbage: %s", peer.session, reason(exc))
            why = f"not a request of protocol {VERSION}: {reason(exc)}"
            self.reply(peer, Refused(_request_id(frames), "bad_request", why))
            return
        self._on_request(peer.session, peer, request)

    def took(self, peer: Peer) -> None:
        if peer.session in self._behind:
            self._note_taken(peer.session)

    def gone(self, peer: Peer) -> None:
        if peers := self._of.get(peer.session):
            peers.discard(peer)
        if peer.session in self._behind and peer.waiting and not self._unread(peer.session)[0]:
            self._note_taken(peer.session)

    def _why_not(self, peer: Peer) -> tuple[Code, str]:
        if peer.identity[:TOKEN_BYTES] in self._sessions:
            most = share(PEERS_MAX, PEERS_SHARE)
            return "limit", (
                f"a session may have {most} connections: ask in fewer threads, or raise the "
                "daemon's `ulimit -n`"
            )
        return "no_session", "this rpc connection belongs to no open lifeline; connect again"

    # --- what is not read ----------------------------------------------------------------

    def _send(self, peer: Peer, data: bytes) -> None:
        session = peer.session
        if not session:
            peer.take(data)
        elif not peer.send(data):
            count, nbytes = self._unread(session)
            if count > UNREAD_MAX or nbytes > UNREAD_MAX_BYTES:
                self._on_deaf(session, f"does not read: {count} replies unread, {nbytes} bytes")
            elif session not in self._behind:
                self._behind.add(session)
                self._on_unread(session, count)

    def _unread(self, session: int) -> tuple[int, int]:
        peers = self._of[session]
        return sum(p.waiting for p in peers), sum(p.waiting_bytes for p in peers)

    def _note_taken(self, session: int) -> None:
        count, _ = self._unread(session)
        if not count:
            self._behind.discard(session)
        if not self._closed:
            self._on_unread(session, count)


def _request_id(rest: list[bytes]) -> int:
    """Return the id of a request that cannot be served, so that its sender gets an answer; 0
    without an id."""
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
        what = f"cannot send the answer ({type(reply).__name__}): {exc}"
        log.error("%s", what)
        why = f"{what}. This is a bug in swapd; its log says more, and it serves others on"
        return encode(Refused(reply.id, "internal", why))


#: Records, and bytes of them, kept for a slow subscriber.
BACKLOG_MAX = 100_000
BACKLOG_MAX_BYTES = 64 << 20
#: Time limit for the last records at the end of the stream.
LINGER_S = 0.2
#: Most topics of one subscriber, and bytes of one topic.
TOPICS_MAX = 64
TOPIC_MAX_BYTES = 1024

_STREAM_TERMS = SocketTerms(b"PUB", (b"SUB", b"XSUB"), TOPIC_MAX_BYTES)


class _Subscriber:
    def __init__(self, peer: Peer) -> None:
        self.topics: dict[bytes, int] = {}
        self._peer = peer
        #: Missed records of which the peer has not heard yet.
        self._missed = 0

    def publish(self, lines: Sequence[bytes], frames: Sequence[bytes]) -> None:
        for line, frame in zip(lines, frames, strict=True):
            if self._wants(line):
                self._add(line, frame)

    def _add(self, line: bytes, frame: bytes) -> None:
        peer = self._peer
        if peer.waiting >= BACKLOG_MAX or peer.waiting_bytes >= BACKLOG_MAX_BYTES:
            self._missed += 1
            return
        if self._missed:
            peer.send(zmtp.frame(missed(line, self._missed)))
            self._missed = 0
        peer.send(frame)

    def _wants(self, line: bytes) -> bool:
        return b"" in self.topics or any(line.startswith(topic) for topic in self.topics)


class Publisher(Peers):
    """Only `close` blocks."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: Path,
        crashed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(path, loop, _STREAM_TERMS, crashed)
        self._subscribers: dict[Peer, _Subscriber] = {}

    def publish(self, lines: Sequence[bytes]) -> None:
        if self._subscribers:
            frames = [zmtp.frame(line) for line in lines]
            for subscriber in list(self._subscribers.values()):
                subscriber.publish(lines, frames)

    def close(self) -> None:
        """End the stream once all subscribers have taken all of it, or after LINGER_S. Blocks until
        then."""
        until = time.monotonic() + LINGER_S
        while (behind := self._behind()) and (left := until - time.monotonic()) > 0:
            poll = select.poll()
            for fd in behind:
                poll.register(fd, select.POLLOUT)
            for fd, _ in poll.poll(left * 1000):
                behind[fd].push()
        super().close()

    def _behind(self) -> dict[int, Peer]:
        return {peer.fileno(): peer for peer in self._subscribers if peer.behind}

    # --- of the peers --------------------------------------------------------------------

    def greeted(self, peer: Peer) -> None:
        if peer not in self._subscribers:
            self._subscribers[peer] = _Subscriber(peer)
            self._door.stay(peer)

    def received(self, peer: Peer, frames: list[bytes]) -> None:
        verb, topic = frames[0][:1], frames[0][1:]
        topics = self._subscribers[peer].topics
        if verb == b"\1":
            topics[topic] = topics.get(topic, 0) + 1
            if len(topics) > TOPICS_MAX:
                peer.turn_out(f"subscribes to more than {TOPICS_MAX} topics")
        elif verb == b"\0" and topic in topics:
            topics[topic] -= 1
            if not topics[topic]:
                del topics[topic]

    def gone(self, peer: Peer) -> None:
        self._subscribers.pop(peer, None)
