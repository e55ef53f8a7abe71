"""The rpc channel: every request is answered, even if the reply is impossible."""

import asyncio
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from swapd.daemon.peers import Peer
from swapd.daemon.router import Router
from swapd.shared import protocol
from swapd.shared.protocol import AnyReply, AnyRequest, Done, Refused, StatusReply
from swapd_client.errors import InternalError, from_refusal
from tests.samples import sample

TOKENS = {1: b"one" * 5 + b"1", 2: b"two" * 5 + b"2"}

Ask = Callable[[int, AnyRequest], Awaitable[AnyReply]]


@asynccontextmanager
async def served(folder: Path, answer: Callable[[int, AnyRequest], AnyReply]) -> AsyncIterator[Ask]:
    """Sessions 1 and 2 of a router that replies with `answer(session, request)`."""
    context = zmq.asyncio.Context()

    crashed = asyncio.get_running_loop().create_future()

    def on_request(session: int, peer: Peer, request: AnyRequest) -> None:
        router.reply(peer, answer(session, request))

    def on_deaf(session: int, why: object) -> None:
        raise AssertionError(f"session {session} {why}")

    loop = asyncio.get_running_loop()
    router = Router(loop, folder / "rpc.sock", on_request, on_deaf, on_deaf, crashed.set_exception)
    sockets = {}
    for session, token in TOKENS.items():
        router.open(token, session)
        sockets[session] = socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, token + struct.pack(">I", 0))
        socket.connect(f"ipc://{folder / 'rpc.sock'}")

    async def ask(session: int, request: AnyRequest) -> AnyReply:
        await sockets[session].send(protocol.encode(request))
        async with asyncio.timeout(60):
            reply: AnyReply = protocol.decode_reply(await sockets[session].recv())
        assert not crashed.done()
        return reply

    try:
        yield ask
    finally:
        router.close()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "said",
    [{"hits": 1 << 64}, {"waiting": -(1 << 64)}, {"runtime_dir": "/run/\udcff"}, {"notes": {1j}}],
    ids=["too large", "too small", "no text", "no data"],
)
async def test_an_answer_that_cannot_be_sent_is_a_refusal_and_costs_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: dict[str, Any]
) -> None:
    impossible = msgspec.structs.replace(sample(StatusReply), **said)

    def answer(session: int, request: AnyRequest) -> AnyReply:
        if session == 1:
            wrong: AnyReply = msgspec.structs.replace(impossible, id=request.id)
            return wrong
        return Done(request.id)

    async with served(tmp_path, answer) as ask:
        with caplog.at_level(logging.ERROR, "swapd.daemon.router"):
            refused = await ask(1, protocol.Status(7))
        assert isinstance(refused, Refused)
        assert (refused.id, refused.code) == (7, "internal")
        assert "StatusReply" in refused.message
        assert isinstance(from_refusal(refused), InternalError)
        assert "StatusReply" in caplog.text
        assert await ask(2, protocol.Status(8)) == Done(8)
        assert isinstance(await ask(1, protocol.Status(9)), Refused)
