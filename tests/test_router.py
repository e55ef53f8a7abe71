"""Each request has a reply; those that a peer does not read are kept, within a limit of time."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq

from swapd.daemon import router, zmtp
from swapd.daemon.peers import Peer
from swapd.daemon.router import Router
from swapd.shared import protocol
from swapd_client.errors import SwapdError, from_refusal
from tests.fenced import FencedByCore
from tests.samples import sample
from tests.test_door import connected

TOKEN = b"t" * protocol.TOKEN_BYTES
#: More replies than two sockets and the connection between them take.
MANY = 10_000


class Asked(NamedTuple):
    router: Router
    #: The peer that asked, as the router knows it, and its own socket.
    asker: Peer
    socket: "zmq.Socket[bytes]"
    #: The router's report of a deaf session.
    said: "asyncio.Future[tuple[int, str]]"
    #: The reported numbers of replies kept for session 7.
    told: "asyncio.Queue[int]"


@asynccontextmanager
async def asked(folder: Path) -> AsyncIterator[Asked]:
    """A router that has a request from a peer of session 7."""
    context = zmq.Context()
    loop = asyncio.get_running_loop()
    said = loop.create_future()
    asker = loop.create_future()

    def on_deaf(session: int, why: str) -> None:
        made.forget(TOKEN)
        said.set_result((session, why))

    def on_request(session: int, peer: Peer, request: protocol.AnyRequest) -> None:
        asker.set_result(peer)

    def on_unread(session: int, count: int) -> None:
        assert session == 7
        told.put_nowait(count)

    told: asyncio.Queue[int] = asyncio.Queue()
    where = folder / "rpc.sock"
    made = Router(loop, where, on_request, on_unread, on_deaf, said.set_exception)
    made.open(TOKEN, 7)
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.ROUTING_ID, TOKEN + b"0")
    peer.connect(f"ipc://{folder / 'rpc.sock'}")
    peer.send(protocol.encode(protocol.StatusRequest(1)))
    try:
        yield Asked(made, await asker, peer, said, told)
    finally:
        peer.close(linger=0)
        made.close()
        context.term()


@pytest.mark.parametrize(("count", "chars"), [(MANY, 1), (40, 1 << 20)], ids=["many", "long"])
async def test_what_a_peer_does_not_take_comes_later_and_in_order(
    tmp_path: Path, count: int, chars: int
) -> None:
    why = "x" * chars
    async with asked(tmp_path) as (made, asker, socket, said, told):
        for number in range(count):
            made.reply(asker, protocol.Refused(number, "too_large", why))
        for number in range(count):
            got = await asyncio.to_thread(socket.recv)
            assert protocol.decode_reply(got) == protocol.Refused(number, "too_large", why)
        assert not said.done()
        counts = [told.get_nowait() for _ in range(told.qsize())]
        assert counts[0] == 1
        assert counts[-1] == 0, "it has read them all"
        assert counts[1:] == sorted(set(counts[1:]), reverse=True), "it took some each time"
        assert len(counts) > 2, "it was told of as it took them"


async def test_a_session_that_takes_no_reply_for_long_ends(tmp_path: Path) -> None:
    with FencedByCore(unread_timeout_s=0.1) as core:
        async with asked(tmp_path) as (made, asker, _, said, told):
            for number in range(MANY):
                made.reply(asker, protocol.Done(number))
            while not told.empty():
                core.hears(told.get_nowait(), channel="replies")
            await core.fenced.wait()
            assert "none taken in 0.1 s" in core.why
            assert not said.done(), "the core says when"


@pytest.mark.parametrize("bound", ["UNREAD_MAX", "UNREAD_MAX_BYTES"])
async def test_a_session_with_more_unread_than_is_kept_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(router, bound, 100)
    async with asked(tmp_path) as (made, asker, _, said, _):
        for number in range(MANY):
            made.reply(asker, protocol.Done(number))
        assert said.done()
        session, why = said.result()
        assert session == 7
        assert "replies unread" in why


async def test_a_reply_to_who_is_gone_costs_nothing(tmp_path: Path) -> None:
    async with asked(tmp_path) as (made, asker, socket, said, told):
        for number in range(MANY):
            made.reply(asker, protocol.Done(number))
        socket.close(linger=0)
        made.reply(asker, protocol.Done(1))
        while await told.get():
            """Until it is seen that the peer is gone."""
        made.reply(asker, protocol.Done(2))
        assert told.empty()
        assert not asker.waiting
        assert not said.done()


async def test_a_peer_of_no_session_is_told_so(tmp_path: Path) -> None:
    async with asked(tmp_path) as (_, _, socket, said, _):
        with socket.context.socket(zmq.DEALER) as stranger:
            stranger.linger, stranger.rcvtimeo = 0, 10_000
            stranger.connect(f"ipc://{tmp_path / 'rpc.sock'}")
            stranger.send(protocol.encode(protocol.StatusRequest(5)))
            refused = protocol.decode_reply(await asyncio.to_thread(stranger.recv))
        assert isinstance(refused, protocol.Refused)
        assert (refused.id, refused.code) == (5, "no_session")
        assert not said.done()


async def test_bytes_that_are_no_zeromq_end_that_connection_alone(tmp_path: Path) -> None:
    async with asked(tmp_path) as (made, asker, socket, said, _):
        with connected(tmp_path / "rpc.sock") as stranger:
            stranger.settimeout(10)
            stranger.send(b"GET / HTTP/1.1\r\n")
            while await asyncio.to_thread(stranger.recv, 1024):
                """Its greeting, and then the end."""
        made.reply(asker, protocol.Done(1))
        done = protocol.decode_reply(await asyncio.to_thread(socket.recv))
        assert done == protocol.Done(1)
        assert not said.done()


async def test_each_question_whether_somebody_is_there_has_one_answer(tmp_path: Path) -> None:
    async with asked(tmp_path):
        with connected(tmp_path / "rpc.sock") as peer:
            peer.settimeout(10)
            peer.sendall(zmtp.GREETING + zmtp.ready(b"DEALER", TOKEN + b"1"))
            heard = b""
            for which in (b"a", b"b"):
                ping = b"\4PING\0\0" + which
                peer.sendall(bytes((4, len(ping))) + ping)
                while not heard.endswith(b"\4PONG" + which):
                    heard += await asyncio.to_thread(peer.recv, 1024)
            assert heard.count(b"PONG") == 2


@pytest.mark.parametrize(
    "said",
    [{"hits": 1 << 64}, {"waiting": -(1 << 64)}, {"runtime_dir": "/run/\udcff"}, {"notes": {1j}}],
    ids=["too large", "too small", "no text", "no data"],
)
async def test_an_answer_that_cannot_be_sent_is_a_refusal_and_costs_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: dict[str, Any]
) -> None:
    impossible = msgspec.structs.replace(sample(protocol.Status), id=7, **said)
    async with asked(tmp_path) as (made, asker, socket, _, _):
        with caplog.at_level(logging.ERROR, "swapd.daemon.router"):
            made.reply(asker, impossible)
        made.reply(asker, protocol.Done(8))
        refused = protocol.decode_reply(await asyncio.to_thread(socket.recv))
        assert isinstance(refused, protocol.Refused)
        assert (refused.id, refused.code) == (7, "internal")
        assert "Status" in refused.message
        assert type(from_refusal(refused)) is SwapdError
        assert "Status" in caplog.text
        done = protocol.decode_reply(await asyncio.to_thread(socket.recv))
        assert done == protocol.Done(8)


async def test_a_handler_that_fails_is_told_of(tmp_path: Path) -> None:
    """It is a bug of the daemon, which then ends, in place of a request without an answer."""
    async with asked(tmp_path) as made:
        made.socket.send(protocol.encode(protocol.StatusRequest(2)))  # `asked` takes one
        with pytest.raises(asyncio.InvalidStateError):
            await asyncio.wait_for(made.said, 30)
