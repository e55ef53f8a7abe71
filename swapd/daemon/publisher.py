"""The swap log as a stream: records to ZeroMQ's SUB sockets.

It never waits for a reader. It keeps records that a subscriber does not take, up to a bound; beyond
that the subscriber misses records. Once the subscriber takes some again, it gets the number of
missed ones; the numbers of records tell it too.
"""

import asyncio
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from swapd.daemon import zmtp
from swapd.daemon.peers import Peer, Peers, SocketTerms
from swapd.log.records import missed

#: Records, and bytes of them, kept for a subscriber that reads slower than they come.
BACKLOG_MAX = 100_000
BACKLOG_MAX_BYTES = 64 << 20
#: How long the last records may take when the stream ends.
LINGER_S = 0.2
#: Limits of one subscriber: number of its topics, and bytes of one.
TOPICS_MAX = 64
TOPIC_MAX_BYTES = 1024

_TERMS = SocketTerms(b"PUB", (b"SUB", b"XSUB"), TOPIC_MAX_BYTES)


class _Subscriber:
    """The topics of one peer."""

    def __init__(self, peer: Peer) -> None:
        self.topics: dict[bytes, int] = {}
        self._peer = peer
        #: Records that it has missed, and was not told of.
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


class Publisher:
    """Publishes to all subscribers. On the loop; only `close` blocks."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: Path,
        crashed: Callable[[BaseException], None],
    ) -> None:
        """Listen at `path`."""
        self._subscribers: dict[Peer, _Subscriber] = {}
        self._peers = Peers(path, loop, _TERMS, self, crashed)

    def publish(self, lines: Sequence[bytes]) -> None:
        """Send each of `lines` to those that want it, as a message of its own."""
        if self._subscribers:
            frames = [zmtp.frame(line) for line in lines]
            for subscriber in list(self._subscribers.values()):
                subscriber.publish(lines, frames)

    def close(self) -> None:
        """End the stream when all subscribers have taken all of it: LINGER_S at most. Blocks so
        long."""
        until = time.monotonic() + LINGER_S
        while (behind := self._behind()) and (left := until - time.monotonic()) > 0:
            poll = select.poll()
            for fd in behind:
                poll.register(fd, select.POLLOUT)
            for fd, _ in poll.poll(left * 1000):
                behind[fd].push()
        self._peers.close()

    def _behind(self) -> dict[int, Peer]:
        return {peer.fileno(): peer for peer in self._subscribers if peer.behind}

    # --- of the peers --------------------------------------------------------------------

    def greeted(self, peer: Peer) -> None:
        if peer not in self._subscribers:
            self._subscribers[peer] = _Subscriber(peer)
            self._peers.tolerate(peer)

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

    def took(self, peer: Peer) -> None:
        """Nothing waits for that."""

    def left(self, peer: Peer) -> None:
        self._subscribers.pop(peer, None)
