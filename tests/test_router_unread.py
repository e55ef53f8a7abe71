"""Replies that a peer does not take: kept, in order, for so long and no more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import zmq

from swapd.daemon import router
from swapd.daemon.peers import Peer
from swapd.daemon.router import Router
from swapd.shared import protocol

TOKEN = b"t" * protocol.TOKEN_BYTES
#: More replies than two sockets and what is between them take.
MANY = 10_000


class Asked(NamedTuple):
    router: Router
    #: Who asked, as the router knows it, and at its own end.
    asker: Peer
    socket: "zmq.Socket[bytes]"
    #: What the router says of a session that is deaf.
    said: "asyncio.Future[tuple[int, str]]"


@asynccontextmanager
async def asked(folder: Path) -> AsyncIterator[Asked]:
    """A router that a peer of session 7 has asked something."""
    context = zmq.Context()
    loop = asyncio.get_running_loop()
    said = loop.create_future()
    asker = loop.create_future()

    def on_deaf(session: int, why: str) -> None:
        made.forget(TOKEN)
        said.set_result((session, why))

    def on_request(session: int, peer: Peer, request: protocol.AnyRequest) -> None:
        asker.set_result(peer)

    made = Router(loop, folder / "rpc.sock", on_request, on_deaf, said.set_exception)
    made.open(TOKEN, 7)
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.ROUTING_ID, TOKEN + b"0")
    peer.connect(f"ipc://{folder / 'rpc.sock'}")
    peer.send(protocol.encode(protocol.Status(1)))
    try:
        yield Asked(made, await asker, peer, said)
    finally:
        peer.close(linger=0)
        made.close()
        context.term()


async def test_what_a_peer_does_not_take_comes_later_and_in_order(tmp_path: Path) -> None:
    async with asked(tmp_path) as (made, asker, socket, said):
        for number in range(MANY):
            made.reply(asker, protocol.Done(number))
        for number in range(MANY):
            got = await asyncio.to_thread(socket.recv)
            assert protocol.decode_reply(got) == protocol.Done(number)
        assert not said.done()


async def test_a_session_that_takes_no_reply_for_long_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "UNREAD_S", 0.1)
    async with asked(tmp_path) as (made, asker, _, said):
        for number in range(MANY):
            made.reply(asker, protocol.Done(number))
        session, why = await said
        assert session == 7
        assert "none taken in 0.1 s" in why


@pytest.mark.parametrize("bound", ["UNREAD_MAX", "UNREAD_MAX_BYTES"])
async def test_a_session_with_more_unread_than_is_kept_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(router, bound, 100)
    async with asked(tmp_path) as (made, asker, _, said):
        for number in range(MANY):
            made.reply(asker, protocol.Done(number))
        assert said.done()
        session, why = said.result()
        assert session == 7
        assert "replies unread" in why


async def test_a_reply_to_who_is_gone_costs_nothing(tmp_path: Path) -> None:
    async with asked(tmp_path) as (made, asker, socket, said):
        for number in range(MANY):
            made.reply(asker, protocol.Done(number))
        socket.close(linger=0)
        made.reply(asker, protocol.Done(1))
        assert not said.done()
