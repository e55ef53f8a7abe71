"""The bytes of ZeroMQ's sockets become messages; forbidden bytes end the connection."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from swapd.daemon import zmtp
from swapd.daemon.zmtp import Decoder, WireError

LONGEST = 5000
READY = zmtp.ready(b"DEALER")


def decoder(*said: bytes, kinds: tuple[bytes, ...] = (b"DEALER",)) -> Decoder:
    made = Decoder(kinds, LONGEST)
    made.feed(b"".join(said))
    return made


def shaken(*said: bytes) -> Decoder:
    return decoder(zmtp.GREETING, READY, *said)


Ends = tuple["zmq.Socket[bytes]", socket.socket]


@contextmanager
def connected(folder: Path, kind: int, options: dict[int, Any]) -> Iterator[Ends]:
    """A socket of libzmq, and the other end of its connection, which has sent its greeting."""
    with socket.socket(socket.AF_UNIX) as listener, zmq.Context() as context:
        listener.bind(str(folder / "sock"))
        listener.listen()
        made = context.socket(kind)
        for option, value in options.items():
            made.setsockopt(option, value)
        made.connect(f"ipc://{folder / 'sock'}")
        sock, _ = listener.accept()
        with sock:
            sock.sendall(zmtp.GREETING + zmtp.ready(b"PUB" if kind == zmq.SUB else b"ROUTER"))
            yield made, sock
            made.close(linger=0)


def hear(sock: socket.socket, into: Decoder) -> list[bytes]:
    while (message := into.next()) is None:
        into.feed(sock.recv(1000))
    return message


def test_what_a_dealer_sends_is_received_and_what_it_is_sent_it_receives(tmp_path: Path) -> None:
    with connected(tmp_path, zmq.DEALER, {zmq.ROUTING_ID: b"me"}) as (dealer, sock):
        into = Decoder((b"DEALER",), 1 << 20)
        for payload in (b"", b"x", b"y" * 255, b"z" * 256, b"w" * 70_000):
            dealer.send(payload)
            assert hear(sock, into) == [payload]
            sock.sendall(zmtp.frame(payload))
            assert dealer.recv() == payload
        assert into.identity == b"me"
        dealer.send_multipart([b"a", b"", b"b"])
        assert hear(sock, into) == [b"a", b"", b"b"]


def test_what_a_subscriber_asks_for_is_heard(tmp_path: Path) -> None:
    with connected(tmp_path, zmq.SUB, {zmq.SUBSCRIBE: b"a"}) as (subscriber, sock):
        into = Decoder((b"SUB",), 100)
        assert hear(sock, into) == [b"\1a"]
        subscriber.setsockopt(zmq.UNSUBSCRIBE, b"a")
        assert hear(sock, into) == [b"\0a"]


def test_a_peer_that_asks_whether_somebody_is_there_is_answered(tmp_path: Path) -> None:
    often: dict[int, Any] = {zmq.HEARTBEAT_IVL: 20, zmq.HEARTBEAT_TIMEOUT: 60_000}
    with connected(tmp_path, zmq.DEALER, often) as (_, sock):
        into = Decoder((b"DEALER",), 100)
        while not into.answers:
            assert into.next() is None
            into.feed(sock.recv(1000))
            into.next()
        assert into.answers[0].startswith(b"\4\5\4PONG")


@pytest.mark.parametrize("step", [1, 7, 63])
def test_bytes_may_come_in_any_pieces(step: int) -> None:
    said = zmtp.GREETING + READY + zmtp.frame(b"a" * 300) + zmtp.frame(b"")
    made, got = Decoder((b"DEALER",), LONGEST), []
    for at in range(0, len(said), step):
        made.feed(said[at : at + step])
        while (message := made.next()) is not None:
            got.append(message)
    assert got == [[b"a" * 300], [b""]]


LONG = b"\2" + (LONGEST + 1).to_bytes(8, "big")


@pytest.mark.parametrize(
    "said",
    [
        [b"GET / HTTP/1.1\r\n"],
        [b"\xff" + bytes(8) + b"\x7e"],
        [b"\xff" + bytes(8) + b"\x7f\1"],
        [zmtp.GREETING.replace(b"NULL", b"PLAI")],
        [zmtp.GREETING, zmtp.ready(b"SUB")],
        [zmtp.GREETING, b"\4\5\5READ"],
        [zmtp.GREETING, b"\4\x09\5READY\1a\0"],
        [zmtp.GREETING, b"\4\0"],
        [zmtp.GREETING, zmtp.frame(b"early")],
        [zmtp.GREETING, READY, b"\x08\0"],
        [zmtp.GREETING, READY, b"\5\0"],
        [zmtp.GREETING, READY, LONG],
        [zmtp.GREETING, READY, b"\3" + LONGEST.to_bytes(8, "big") + bytes(LONGEST) + b"\0\1"],
        [zmtp.GREETING, READY, b"\1\0" * zmtp.FRAMES_MAX + b"\0\0"],
        [zmtp.GREETING, READY, b"\6" + (1 << 40).to_bytes(8, "big")],
        [zmtp.GREETING, READY, b"\4\6\5ERROR"],
    ],
)
def test_what_must_not_be_said_is_refused_before_more_of_it_comes(said: list[bytes]) -> None:
    made = decoder(*said)
    with pytest.raises(WireError):
        made.next()


def test_only_what_can_be_part_of_a_message_waits() -> None:
    assert shaken(LONG[:8]).next() is None
    assert shaken(b"\1\0", b"\0").next() is None
    assert decoder(zmtp.GREETING[:20]).next() is None
    assert shaken(b"\1\1a\0\1b").next() == [b"a", b"b"]
