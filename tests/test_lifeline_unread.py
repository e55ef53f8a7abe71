"""Messages kept for a worker that does not read: how many, for how long, and at its own expense."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from swapd.daemon.lifeline import Lifeline, LifelineServer
from swapd.shared import protocol
from swapd.shared.fds import recv_packet
from tests.fenced import FencedByCore

#: More than a socket takes.
MANY = 5000
GOODBYE = protocol.Goodbye("fenced", "why")


class Deaf:
    """A lifeline whose worker reads only when the test says so, and the server's reports of it."""

    def __init__(self, folder: Path) -> None:
        loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.hello: asyncio.Future[Lifeline] = loop.create_future()
        #: The reported numbers of kept messages.
        self.told: list[int] = []
        self.core = FencedByCore()
        self.server = LifelineServer(
            folder / "lifeline.sock",
            loop,
            self._hello,
            lambda *_: None,
            self._unread,
            lambda _: self.gone.set_result(None),
        )
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(str(folder / "lifeline.sock"))
        self.sock.send(protocol.encode(protocol.Hello(protocol.VERSION, "deaf")))

    def _hello(self, lifeline: Lifeline, _: protocol.Hello) -> None:
        lifeline.session = 1
        self.hello.set_result(lifeline)

    def fence(self, lifeline: Lifeline, unread_timeout_s: float) -> None:
        """From now on have the core's decision end it."""
        self.core = FencedByCore(lifeline, unread_timeout_s=unread_timeout_s)

    def _unread(self, lifeline: Lifeline, count: int, error: str) -> None:
        assert error == ""
        self.told.append(count)
        self.core.hears(count)

    def hear(self) -> protocol.FromDaemon | None:
        data, _ = recv_packet(self.sock, protocol.LIFELINE_MAX_BYTES)
        return protocol.decode_from_daemon(data) if data else None

    async def hear_until(self, last: protocol.FromDaemon | None) -> list[protocol.FromDaemon]:
        """The messages before `last`; None is the end."""
        heard = []
        while (message := await asyncio.to_thread(self.hear)) != last:
            assert message is not None
            heard.append(message)
        return heard


@asynccontextmanager
async def deaf(folder: Path) -> AsyncIterator[tuple[Lifeline, Deaf]]:
    peer = Deaf(folder)
    try:
        yield await peer.hello, peer
    finally:
        peer.core.__exit__(None, None, None)
        peer.sock.close()
        peer.server.close("stopping", "over")


def contend(line: Lifeline, names: tuple[str, ...] = ()) -> None:
    for _ in range(MANY):
        for waits in (True, False):
            line.send(protocol.Hurry(waits))
            for name in names:
                line.send(protocol.Wanted(name, waits))


async def test_hints_are_state_and_the_newest_is_heard(tmp_path: Path) -> None:
    async with deaf(tmp_path) as (line, peer):
        contend(line, ("a", "b"))
        line.send(protocol.Hurry(True))
        line.send(protocol.Wanted("b", True))
        assert line.unread == 0
        line.send(protocol.Broken("a", 1, "last"))
        heard = await peer.hear_until(protocol.Broken("a", 1, "last"))
        contend(line)
        line.send(protocol.Wanted("c", True))
        heard += await peer.hear_until(protocol.Wanted("c", True))
        assert not peer.gone.done()
        assert len(heard) < MANY
        now: dict[str, bool] = {}
        for hint in heard:
            if isinstance(hint, protocol.Hurry):
                assert now.get("", False) != hint.waits, "it knew"
                now[""] = hint.waits
            elif isinstance(hint, protocol.Wanted):
                assert now.get(hint.name, False) != hint.wanted, "it knew"
                now[hint.name] = hint.wanted
        assert (now["a"], now["b"]) == (False, True)


async def test_a_component_that_is_revoked_again_is_told_once(tmp_path: Path) -> None:
    async with deaf(tmp_path) as (line, peer):
        for generation in range(MANY):
            line.send(protocol.Revoke("a", generation))
            line.send(protocol.Saved("m", generation))
        assert line.unread == 2
        line.send(protocol.Broken("a", 1, "last"))
        heard = await peer.hear_until(protocol.Broken("a", 1, "last"))
        assert heard[-2:] in (
            [protocol.Revoke("a", MANY - 1), protocol.Saved("m", MANY - 1)],
            [protocol.Saved("m", MANY - 1), protocol.Revoke("a", MANY - 1)],
        )


async def test_what_is_state_ends_no_session_however_long_nobody_reads(tmp_path: Path) -> None:
    async with deaf(tmp_path) as (line, peer):
        peer.fence(line, 0.0)
        contend(line, ("a",))
        for generation in range(MANY):
            line.send(protocol.Revoke("a", generation))
        assert line.unread == 1
        await asyncio.to_thread(peer.hear)
        await asyncio.sleep(0)
        assert not peer.gone.done()
        assert await peer.hear_until(protocol.Revoke("a", MANY - 1))


async def test_what_is_said_once_and_not_taken_for_long_ends_the_session(tmp_path: Path) -> None:
    async with deaf(tmp_path) as (line, peer):
        peer.fence(line, 0.2)
        for generation in range(MANY):
            line.send(protocol.Broken("a", generation, "why"))
        assert not peer.gone.done(), "its messages were counted"
        await peer.gone
        assert line.closed
        assert "none taken in 0.2 s" in peer.core.why
        assert len(peer.told) == 1, "what did not change was told again"


async def test_a_session_that_takes_some_of_it_now_and_then_goes_on(tmp_path: Path) -> None:
    async with deaf(tmp_path) as (line, peer):
        peer.fence(line, 2.0)
        for generation in range(MANY):
            line.send(protocol.Broken("a", generation, "why"))
        for generation in range(MANY):
            heard = await asyncio.to_thread(peer.hear)
            assert heard == protocol.Broken("a", generation, "why")
        assert line.unread == 0
        assert not peer.gone.done()
        assert len(peer.told) > 2
        assert peer.told[-1] == 0
        assert peer.told[1:] == sorted(set(peer.told[1:]), reverse=True), "it took some each time"


async def test_hints_leave_room_for_the_last_words(tmp_path: Path) -> None:
    async with deaf(tmp_path) as (line, peer):
        for name in map(str, range(MANY)):
            line.send(protocol.Wanted(name, True))
        line.send(protocol.Saved("m", 7))
        peer.server.drop(line, GOODBYE.code, GOODBYE.message)
        heard = await peer.hear_until(GOODBYE)
        assert heard[-1] == protocol.Saved("m", 7)
        assert await peer.hear_until(None) == []
