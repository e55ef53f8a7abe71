"""Connections are let in again after a shortage; one that is gone takes nobody's place."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swapd.daemon import door, zmtp
from swapd.daemon import peers as peers_module
from swapd.daemon.door import GUESTS_MAX, Door
from swapd.daemon.peers import Peer, Peers, SocketTerms
from swapd.shared import fds
from tests.test_publisher import LAST, Reader, published, rest

TERMS = SocketTerms(b"ROUTER", (b"DEALER",), 1024)


def connected(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(60)
    made.connect(str(path))
    return made


async def test_after_a_shortage_of_descriptors_a_guest_goes_and_others_come_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "PAUSE_S", 0.001)
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def accepted(self: socket.socket) -> tuple[socket.socket, Any]:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accepted)
    entries: asyncio.Queue[socket.socket] = asyncio.Queue()
    made_room: list[bool] = []

    def make_room(_: Door) -> bool:
        made_room.append(True)
        return True

    monkeypatch.setattr(Door, "make_room", make_room)
    listening = Door(
        tmp_path / "sock",
        socket.SOCK_STREAM,
        asyncio.get_running_loop(),
        lambda sock, _: entries.put_nowait(sock),
    )
    with connected(tmp_path / "sock"), await entries.get() as entered:
        assert entered.fileno() >= 0
        assert made_room == [True]
    listening.close()


async def test_without_room_a_guest_goes_for_the_newcomer_or_that_one_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sock"
    entries: asyncio.Queue[socket.socket] = asyncio.Queue()
    refusals: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    guests: list[Callable[[], None]] = []

    def make_room(_: Door) -> bool:
        for turn_out in guests[:1]:
            turn_out()
        return bool(guests and guests.pop(0))

    monkeypatch.setattr(Door, "make_room", make_room)
    listening = Door(
        path,
        socket.SOCK_STREAM,
        asyncio.get_running_loop(),
        lambda sock, _: entries.put_nowait(sock),
        lambda sock, code, why: refusals.put_nowait((code, why)),
    )
    with connected(path), await entries.get() as guest:
        number = guest.fileno()
        free = os.dup(number)
        os.close(free)
        monkeypatch.setattr(fds, "limit", lambda: free + fds.RESERVE)
        guests += [guest.close, lambda: None]  # the second one's number is another thread's at once
        with connected(path) as newcomer, await entries.get() as entered:
            assert entered.fileno() == number
            newcomer.send(b"x")
            assert entered.recv(1) == b"x"
            for _ in range(2):  # at last without a guest
                with connected(path) as refused:
                    code, why = await refusals.get()
                    assert (code, "`ulimit -n`" in why) == ("limit", True)
                    assert refused.recv(1) == b""
    assert entries.empty()
    listening.close()


class Deaf(Peers):
    """Peers that nobody serves."""

    ended: asyncio.Queue[Peer]

    def greeted(self, peer: Peer) -> None: ...
    def received(self, peer: Peer, frames: list[bytes]) -> None: ...

    def gone(self, peer: Peer) -> None:
        self.ended.put_nowait(peer)


async def test_connections_that_are_gone_take_no_place_of_a_guest(tmp_path: Path) -> None:
    path, loop = tmp_path / "rpc.sock", asyncio.get_running_loop()
    crashed = loop.create_future()
    peers = Deaf(path, loop, TERMS, crashed.set_exception)
    peers.ended = asyncio.Queue()
    with connected(path) as first:
        assert await asyncio.to_thread(first.recv, 1) == b"\xff", "it was let in"
        for _ in range(GUESTS_MAX + 2):
            connected(path).close()
            await peers.ended.get()
        first.setblocking(False)
        first.recv(1024)  # the rest of the greeting
        with pytest.raises(BlockingIOError):
            first.recv(1)  # and no end
    assert not crashed.done()
    peers.close()


async def test_incomplete_messages_are_bounded_together_and_who_has_most_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "KEPT_MAX_BYTES", 1000)
    monkeypatch.setattr(door, "GUEST_S", 3600.0)
    path, loop = tmp_path / "rpc.sock", asyncio.get_running_loop()
    crashed = loop.create_future()
    peers = Deaf(path, loop, TERMS, crashed.set_exception)
    peers.ended = asyncio.Queue()
    with connected(path) as few, connected(path) as most:
        for sock, nbytes in ((few, 400), (most, 700)):
            begin = zmtp.frame(bytes(900))[:nbytes]
            sock.sendall(zmtp.GREETING + zmtp.ready(b"DEALER") + begin)
        await asyncio.wait_for(peers.ended.get(), 30)
        while await asyncio.to_thread(most.recv, 1024):
            """Its greeting, and then the end."""
        assert peers.ended.empty()
    assert not crashed.done()
    peers.close()


async def test_a_subscriber_stays_longer_than_others_without_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "GUEST_S", 0.1)
    async with published(tmp_path, b"a") as (made, reader):
        silent = Reader(tmp_path)
        assert await rest(silent) == [], "it ends, after the time of a subscriber that came before"
        silent.sock.close()
        made.publish([b"a1", LAST])
        assert await rest(reader) == [b"a1"]
