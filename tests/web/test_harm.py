"""No HTTP traffic disturbs the daemon or keeps the page from others."""

import os
import resource
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from swapd.web import http
from swapd.web.http import HEADERS_MAX_BYTES
from tests.web.conftest import MIB, Served


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


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n",
        b"GET /status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\n",
        b"GET /status HTTP/1.1\r\nHost: localh",
    ],
    ids=["post", "body", "headers"],
)
def test_requests_that_never_end_lock_nobody_out(served: Served, sent: bytes) -> None:
    with many_descriptors(), ExitStack() as stack:
        for _ in range(2 * http.ASKING_MAX):
            stack.enter_context(served.plug()).sendall(sent)
        for path in ("/healthz", "/metrics", "/", "/status"):
            assert served.ask(path).status == 200


def test_answers_that_are_never_read_leave_places_for_probes_and_metrics(served: Served) -> None:
    with many_descriptors(), ExitStack() as stack, served.connect() as client:
        for at in range(300):
            client.register(f"unread-{at}", {"w": bytearray(64)})
        for _ in range(4 * http.ANSWERING_MAX):
            line = stack.enter_context(served.plug())
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            line.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert served.ask("/healthz").status == 200
        assert served.ask("/metrics").status == 200
        client.acquire("unread-0").release()


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


def test_a_page_whose_process_is_killed_comes_back(served: Served) -> None:
    (page,) = children(served.daemon.pid)
    os.kill(page, signal.SIGKILL)
    with served.connect() as client:
        client.register("after", {"w": bytearray(MIB)})
        client.acquire("after").release()
        served.until("after", loads=1, state="idle")
    assert "started again" in served.daemon.log


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_page_ends_with_the_daemon(how: signal.Signals) -> None:
    one = Served()
    try:
        with one.plug() as begun:
            begun.sendall(b"GET /status")
            assert one.ask("/healthz").status == 200
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
