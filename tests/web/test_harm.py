"""No HTTP traffic disturbs the daemon or keeps the page from others."""

import os
import resource
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from swapd.web import guard
from swapd.web.guard import CONNECTIONS_MAX, HEADERS_MAX_BYTES, Guarded
from tests.web.conftest import MIB, Served, Updates


@contextmanager
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_connections_leave_room_for_who_asks(served: Served) -> None:
    with many_descriptors(), ExitStack() as stack, served.connect() as client:
        client.register("crowded", {"w": bytearray(MIB)})
        for _ in range(1000):
            stack.enter_context(served.plug())
        client.acquire("crowded").release()
        assert served.ask("/healthz").status == 200


def test_pages_that_are_never_read_are_bounded_and_slow_nobody_down(served: Served) -> None:
    with ExitStack() as stack, served.connect() as client:
        client.register("unread", {"w": bytearray(MIB)})
        for _ in range(2 * CONNECTIONS_MAX):
            line = stack.enter_context(served.plug())
            line.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(100):
            client.acquire("unread").release()
        assert served.daemon.status().hits >= 99
    while True:  # there may be no room until the closed connections are noticed
        with suppress(ConnectionError):
            assert served.ask("/healthz").status == 200
            break


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 2 * HEADERS_MAX_BYTES + b"\r\n\r\n",
    ],
    ids=["tls", "version", "bytes", "length", "header"],
)
def test_garbage_is_refused(served: Served, sent: bytes) -> None:
    with served.plug() as line:
        line.sendall(sent)
        assert line.recv(4096).startswith(b"HTTP/1.1 4")


class Transport:
    """A transport that notes that it was ended."""

    def __init__(self) -> None:
        self.unread = 0
        self.ended = False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.ended = True

    def get_extra_info(self, name: str) -> Any:
        return None

    def is_closing(self) -> bool:
        return self.ended


class Loop:
    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now


@contextmanager
def connection() -> Iterator[tuple[Guarded, Transport, Loop]]:
    server, loop, transport = guard.server(None), Loop(), Transport()
    server.config.load()
    made = Guarded(server.config, server.server_state, {}, loop)  # type: ignore[arg-type]
    made.connection_made(transport)
    yield made, transport, loop


class Answering:
    response_complete = False


def test_who_takes_too_long_to_ask_is_ended_however_much_he_says_meanwhile() -> None:
    with connection() as (made, transport, loop):
        for _ in range(10):
            made.data_received(b"GET / HTTP/1.1\r\n" if loop.now == 100.0 else b"X: y\r\n")
            made.look()
            assert not transport.ended
            loop.now += guard.ASK_S / 10
        loop.now += 0.1
        made.look()
        assert transport.ended


def test_who_does_not_read_is_ended_and_who_reads_slowly_is_not() -> None:
    for reads in (True, False):
        with connection() as (made, transport, loop):
            made.cycle = Answering()  # type: ignore[assignment]
            transport.unread = 1 << 20
            for _ in range(5):
                made.look()
                loop.now += guard.READ_S / 2
                transport.unread -= 1000 if reads else 0
            made.look()
            assert transport.ended != reads


def test_a_page_whose_process_is_killed_comes_back(served: Served) -> None:
    (page,) = children(served.daemon.pid)
    os.kill(page, signal.SIGKILL)
    with served.connect() as client, Updates(served) as again:
        client.register("after", {"w": bytearray(MIB)})
        client.acquire("after").release()
        again.until("after", loads=1, state="idle")
    assert "started again" in served.daemon.log


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_page_ends_with_the_daemon(how: signal.Signals) -> None:
    one = Served()
    try:
        with Updates(one) as page:
            page.next()
            (process,) = children(one.daemon.pid)
            watched = os.pidfd_open(process)
            os.kill(one.daemon.pid, how)
            one.daemon.wait()
            with os.fdopen(watched, "rb", closefd=True) as ending:
                assert ended(ending.fileno())
        assert "started again" not in one.daemon.log
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", one.port))
    finally:
        one.close()


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 60.0)[0])


def children(pid: int) -> list[int]:
    """The children of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task")
    found = (path / "children" for path in tasks.iterdir())
    return [int(child) for each in found for child in each.read_text().split()]
