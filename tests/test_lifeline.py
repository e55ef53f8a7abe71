"""A brief shortage on the machine ends no session and loses no message; and a worker that does not
read has its messages kept, at its own expense."""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from swapd.daemon import lifeline
from swapd.daemon.lifeline import Lifeline, LifelineServer
from swapd.device import DeviceError
from swapd.shared import fds, protocol
from swapd.shared.fds import OwnedFd, recv_packet
from tests.fenced import FencedByCore


class Ends(NamedTuple):
    """Both ends of one lifeline, and a future that the daemon's callback sets when it is gone."""

    lifeline: Lifeline
    sock: socket.socket
    gone: "asyncio.Future[None]"
    #: Reports of messages kept for it: how many, and why they cannot be sent.
    unread: "asyncio.Queue[tuple[int, str]]"
    server: LifelineServer


@asynccontextmanager
async def session(folder: Path, core: FencedByCore | None = None) -> AsyncIterator[Ends]:
    """A session that `core`, if there is one, may end; its worker reads when the test says so."""
    loop = asyncio.get_running_loop()
    opened: asyncio.Future[Lifeline] = loop.create_future()
    gone: asyncio.Future[None] = loop.create_future()

    def on_hello(line: Lifeline, hello: protocol.Hello) -> None:
        line.session = 1
        if core is not None:
            core.lifeline = line
        opened.set_result(line)

    def on_unread(_: Lifeline, count: int, error: str) -> None:
        unread.put_nowait((count, error))
        if core is not None:
            core.hears(count, error)

    unread: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
    server = LifelineServer(
        folder / "sock",
        loop,
        on_hello,
        lambda *_: None,
        on_unread,
        lambda _: gone.set_result(None),
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(30)
        sock.connect(str(folder / "sock"))
        sock.send(protocol.encode(protocol.Hello(protocol.VERSION)))
        yield Ends(await opened, sock, gone, unread, server)
        server.close("stopping", "")


async def hear(ends: Ends) -> tuple[protocol.FromDaemon, int]:
    """The next message, and the number of descriptors with it."""
    data, got = await asyncio.to_thread(recv_packet, ends.sock, 1 << 16)
    for fd in got:
        fd.close()
    return protocol.decode_from_daemon(data), len(got)


def failing(times: int, error: Exception, then: Callable[..., Any]) -> Callable[..., Any]:
    """Fails so often, then works."""
    left = [error] * times

    def call(*args: Any) -> Any:
        if left:
            raise left.pop()
        return then(*args)

    return call


SHORT = [errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EMFILE]


@pytest.mark.parametrize("number", SHORT, ids=errno.errorcode.get)
async def test_what_the_kernel_has_no_room_for_just_now_is_sent_later_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(lifeline, "RETRY_S", 0.001)
    error = OSError(number, os.strerror(number))
    monkeypatch.setattr(lifeline, "send_packet", failing(3, error, fds.send_packet))
    async with session(tmp_path) as ends:
        for name in ("a", "b", "c"):
            ends.lifeline.send(protocol.Wanted(name, True))
        assert [(await hear(ends))[0] for _ in range(3)] == [
            protocol.Wanted(name, True) for name in ("a", "b", "c")
        ]
        assert not ends.gone.done()


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "injected"), DeviceError("injected")],
    ids=["no descriptor", "the device refuses"],
)
async def test_descriptors_that_cannot_be_opened_just_now_are_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(lifeline, "RETRY_S", 0.001)
    export = failing(3, error, lambda: [OwnedFd(os.dup(0)) for _ in range(2)])
    async with session(tmp_path) as ends:
        ends.lifeline.send(protocol.Files((1, 2)), export=export)
        ends.lifeline.send(protocol.Wanted("a", True))
        assert await hear(ends) == (protocol.Files((1, 2)), 2)
        assert await hear(ends) == (protocol.Wanted("a", True), 0)
        assert [ends.unread.get_nowait() for _ in range(2)] == [(1, str(error)), (0, "")]
        assert ends.unread.empty(), "each try was told of"


async def test_what_cannot_be_sent_for_long_ends_the_session_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline, "RETRY_S", 0.001)
    export = failing(1 << 20, OSError(errno.EMFILE, "injected"), lambda: [])
    with FencedByCore(unread_timeout_s=0.01) as core:
        async with session(tmp_path, core) as ends:
            ends.lifeline.send(protocol.Files((1,)), export=export)
            await ends.gone
            assert ends.lifeline.closed
            assert "injected" in core.why


async def test_what_waits_to_be_sent_holds_no_descriptor(tmp_path: Path) -> None:
    async with session(tmp_path) as ends:
        before = len(os.listdir("/proc/self/fd"))
        opened = [0]

        def export() -> list[OwnedFd]:
            opened[0] += 1
            return [OwnedFd(os.dup(0))]

        for number in range(600):  # more than a socket takes
            ends.lifeline.send(protocol.Files((number,)), export=export)
        assert ends.lifeline.unread
        assert len(os.listdir("/proc/self/fd")) == before
        for number in range(600):
            assert await hear(ends) == (protocol.Files((number,)), 1)
        assert opened[0] >= 600


async def test_what_was_handed_back_before_a_request_is_there_and_nothing_else_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def received(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return recv_packet(*args, **more)

    async with session(tmp_path) as ends:
        monkeypatch.setattr(lifeline, "recv_packet", received)
        for request in (7, 8):
            fds.send_packet(ends.sock, protocol.encode(protocol.HandBack(request)), [0])
        for request in (8, 7):
            copy = ends.lifeline.take_handed_back(request)
            assert copy is not None
            copy.close()
        assert ends.lifeline.take_handed_back(9) is None
        assert len(calls) == 2 + 3, "each message, and one look at what there is for each request"


async def test_nothing_is_kept_of_a_session_that_has_ended(tmp_path: Path) -> None:
    async with session(tmp_path) as ends:
        ends.sock.close()
        await ends.gone
        assert not ends.server._lifelines


async def test_the_end_of_a_session_closes_what_still_waits_for_it(tmp_path: Path) -> None:
    async with session(tmp_path) as ends:
        while not ends.lifeline.unread:
            ends.lifeline.send(protocol.Broken("a", 1, "why"))
        copy = OwnedFd(os.dup(0))
        ends.lifeline.send(protocol.Master("a", 1), [copy])
        assert copy.fileno() >= 0
        ends.lifeline.close()
        with pytest.raises(ValueError, match="descriptor is closed"):
            copy.fileno()
        late = OwnedFd(os.dup(0))
        ends.lifeline.send(protocol.Master("a", 1), [late])
        with pytest.raises(ValueError, match="descriptor is closed"):
            late.fileno()


# --- messages that are not read ----------------------------------------------------------

#: More than a socket takes.
MANY = 5000
LAST = protocol.Broken("a", 1, "last")


async def hear_until(ends: Ends, last: protocol.FromDaemon) -> list[protocol.FromDaemon]:
    """The messages before `last`."""
    heard = []
    while (message := (await hear(ends))[0]) != last:
        heard.append(message)
    return heard


def contend(line: Lifeline, names: tuple[str, ...] = ()) -> None:
    for _ in range(MANY):
        for waits in (True, False):
            line.send(protocol.Hurry(waits))
            for name in names:
                line.send(protocol.Wanted(name, waits))


async def test_hints_are_state_and_the_newest_is_heard(tmp_path: Path) -> None:
    async with session(tmp_path) as ends:
        line = ends.lifeline
        contend(line, ("a", "b"))
        line.send(protocol.Hurry(True))
        line.send(protocol.Wanted("b", True))
        assert line.unread == 0
        line.send(LAST)
        heard = await hear_until(ends, LAST)
        contend(line)
        line.send(protocol.Wanted("c", True))
        heard += await hear_until(ends, protocol.Wanted("c", True))
        assert not ends.gone.done()
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


async def test_what_is_state_is_told_once_and_ends_no_session_however_long_nobody_reads(
    tmp_path: Path,
) -> None:
    with FencedByCore(unread_timeout_s=0.0) as core:
        async with session(tmp_path, core) as ends:
            contend(ends.lifeline, ("a",))
            for generation in range(MANY):
                ends.lifeline.send(protocol.Revoke("a", generation))
                ends.lifeline.send(protocol.Saved("m", generation))
            assert ends.lifeline.unread == 2
            await hear(ends)
            await asyncio.sleep(0)
            assert not ends.gone.done()
            newest = {protocol.Revoke("a", MANY - 1), protocol.Saved("m", MANY - 1)}
            while newest:
                newest.discard((await hear(ends))[0])
            assert ends.unread.empty()


async def test_what_is_state_is_told_after_what_was_said_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder learns that its component is broken before it is revoked, also if an earlier one of
    that name still waits to be revoked."""
    monkeypatch.setattr(lifeline, "RETRY_S", 0.001)
    error = OSError(errno.ENOBUFS, "injected")
    monkeypatch.setattr(lifeline, "send_packet", failing(1, error, fds.send_packet))
    broken, revoked = protocol.Broken("a", 2, "why"), protocol.Revoke("a", 2)
    async with session(tmp_path) as ends:
        for message in (protocol.Revoke("a", 1), broken, revoked):
            ends.lifeline.send(message)
        assert [(await hear(ends))[0] for _ in range(2)] == [broken, revoked]


async def test_what_is_said_once_and_not_taken_for_long_ends_the_session(tmp_path: Path) -> None:
    with FencedByCore(unread_timeout_s=0.2) as core:
        async with session(tmp_path, core) as ends:
            for generation in range(MANY):
                ends.lifeline.send(protocol.Broken("a", generation, "why"))
            assert not ends.gone.done(), "its messages were counted"
            await ends.gone
            assert ends.lifeline.closed
            assert "none taken in 0.2 s" in core.why
            assert ends.unread.qsize() == 1, "what did not change was told again"


async def test_a_session_that_takes_some_of_it_now_and_then_goes_on(tmp_path: Path) -> None:
    with FencedByCore(unread_timeout_s=2.0) as core:
        async with session(tmp_path, core) as ends:
            for generation in range(MANY):
                ends.lifeline.send(protocol.Broken("a", generation, "why"))
            for generation in range(MANY):
                assert (await hear(ends))[0] == protocol.Broken("a", generation, "why")
            assert ends.lifeline.unread == 0
            assert not ends.gone.done()
            told = [ends.unread.get_nowait()[0] for _ in range(ends.unread.qsize())]
            assert len(told) > 2
            assert told[-1] == 0
            assert told[1:] == sorted(set(told[1:]), reverse=True), "it took some each time"


async def test_hints_leave_room_for_the_last_words(tmp_path: Path) -> None:
    async with session(tmp_path) as ends:
        for name in map(str, range(MANY)):
            ends.lifeline.send(protocol.Wanted(name, True))
        ends.lifeline.send(protocol.Saved("m", 7))
        ends.server.drop(ends.lifeline, "fenced", "why")
        heard = await hear_until(ends, protocol.Goodbye("fenced", "why"))
        assert heard[-1] == protocol.Saved("m", 7)
        assert await asyncio.to_thread(recv_packet, ends.sock, 1 << 16) == (b"", [])
