"""Replies that a peer does not take: kept, in order, for so long and no more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from swapd import protocol, router
from swapd.router import Router

TOKEN = b"t" * protocol.TOKEN_BYTES
#: More replies than two sockets and what is between them take.
MANY = 10_000


@asynccontextmanager
async def asked(folder: Path) -> AsyncIterator[tuple[Router, zmq.Socket[bytes], asyncio.Future]]:  # type: ignore[type-arg]
    """A router, a peer of session 7 that it knows, and what it says of a session that is deaf."""
    context = zmq.asyncio.Context()
    said = asyncio.get_running_loop().create_future()
    heard = asyncio.Event()

    def on_deaf(session: int, why: str) -> None:
        made.forget(TOKEN)
        said.set_result((session, why))

    made = Router(context, folder / "rpc.sock", lambda *_: heard.set(), on_deaf)
    made.open(TOKEN, 7)
    serving = asyncio.get_running_loop().create_task(made.serve())
    plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
    peer = plain.socket(zmq.DEALER)
    peer.setsockopt(zmq.ROUTING_ID, TOKEN + b"0")
    peer.connect(f"ipc://{folder / 'rpc.sock'}")
    peer.send(protocol.encode(protocol.Status(1)))
    await heard.wait()
    try:
        yield made, peer, said
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        peer.close(linger=0)
        made.close()
        context.term()


async def test_what_a_peer_does_not_take_comes_later_and_in_order(tmp_path: Path) -> None:
    async with asked(tmp_path) as (made, peer, said):
        for number in range(MANY):
            made.reply(TOKEN + b"0", protocol.Done(number))
        for number in range(MANY):
            got = await asyncio.to_thread(peer.recv)
            assert protocol.decode_reply(got) == protocol.Done(number)
        assert not said.done()


async def test_a_session_that_takes_no_reply_for_long_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "UNREAD_S", 0.1)
    async with asked(tmp_path) as (made, _, said):
        for number in range(MANY):
            made.reply(TOKEN + b"0", protocol.Done(number))
        session, why = await said
        assert session == 7
        assert "none taken in 0.1 s" in why


@pytest.mark.parametrize("bound", ["UNREAD_MAX", "UNREAD_MAX_BYTES"])
async def test_a_session_with_more_unread_than_is_kept_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(router, bound, 100)
    async with asked(tmp_path) as (made, _, said):
        for number in range(MANY):
            made.reply(TOKEN + b"0", protocol.Done(number))
        assert said.done()
        session, why = said.result()
        assert session == 7
        assert "replies unread" in why


async def test_a_reply_to_who_is_gone_costs_nothing(tmp_path: Path) -> None:
    async with asked(tmp_path) as (made, peer, said):
        made.reply(TOKEN + b"never", protocol.Done(1))
        made.reply(TOKEN + b"0", protocol.Done(2))
        assert protocol.decode_reply(await asyncio.to_thread(peer.recv)) == protocol.Done(2)
        assert not said.done()
