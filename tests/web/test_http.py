"""A connection is answered within bounds of time and number, or ended, and harms no other."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from swapd.web import http
from swapd.web.http import Answer, HttpRequest, Server


@asynccontextmanager
async def serving(answer: Callable[[HttpRequest], Awaitable[Answer]]) -> AsyncIterator[int]:
    """The port of a server in this process."""
    server = Server(answer, kept=("/kept",))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(server.serve(listening), name="server")
            yield int(listening.getsockname()[1])
            task.cancel()


async def asked(port: int, sent: bytes) -> bytes:
    """All that the server sends until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def get(path: str, more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode()


async def say_hello(request: HttpRequest) -> Answer:
    return Answer(200, b"hello")


async def test_a_request_that_takes_too_long_is_ended_at_any_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "ASK_S", 0.2)
    async with serving(say_hello) as port:
        for sent in (b"", b"G", get("/")[:-2], get("/", "Content-Length: 9\r\n") + b"body"):
            assert await asked(port, sent) == b""
        assert (await asked(port, get("/"))).endswith(b"hello")


async def test_a_request_that_trickles_in_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "ASK_S", 0.2)
    async with serving(say_hello) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        ended = asyncio.get_running_loop().create_task(reader.read(), name="end")
        writer.write(b"GET / HTTP/1.1\r\n")
        while not ended.done():
            writer.write(b"X: y\r\n")
            await asyncio.wait([ended], timeout=0.01)
        assert ended.exception() is not None or ended.result() == b""
        writer.close()


async def test_a_client_that_does_not_read_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "READ_S", 0.2)
    monkeypatch.setattr(http, "ANSWERING_MAX", 1)

    has_place, may_send = asyncio.Event(), asyncio.Event()

    async def much(request: HttpRequest) -> Answer:
        if request.path != "/much":
            return Answer(200, b"hello")
        has_place.set()
        await may_send.wait()
        return Answer(200, bytes(32 << 20))

    async with serving(much) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get("/much"))
        await has_place.wait()
        assert b" 503 " in await asked(port, get("/"))
        may_send.set()
        while b" 503 " in (said := await asked(port, get("/"))):
            """Its time goes by."""
        assert said.endswith(b"hello")
        writer.close()


async def test_requests_at_once_are_bounded_and_some_paths_have_places_of_their_own() -> None:
    goes_on = asyncio.Event()
    count = 0

    async def wait(request: HttpRequest) -> Answer:
        nonlocal count
        count += 1
        if request.path != "/kept":
            await goes_on.wait()
        return Answer(200, b"done")

    async with serving(wait) as port, asyncio.TaskGroup() as tasks:
        many = [
            tasks.create_task(asked(port, get("/")), name="request")
            for _ in range(http.ANSWERING_MAX + 10)
        ]
        refused: list[asyncio.Task[bytes]] = []
        while len(refused) < 10:
            await asyncio.wait([task for task in many if task not in refused], timeout=0.1)
            refused = [task for task in many if task.done()]
        assert all(b" 503 " in task.result() for task in refused)
        assert (await asked(port, get("/kept"))).endswith(b"done")
        goes_on.set()
    assert sum(task.result().endswith(b"done") for task in many) == http.ANSWERING_MAX == count - 1


async def test_an_error_of_ours_is_logged_and_ends_one_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails(request: HttpRequest) -> Answer:
        raise ValueError("a bug")

    async with serving(fails) as port:
        for _ in range(2):
            assert await asked(port, get("/")) == b""
    assert caplog.text.count("ValueError: a bug") == 2


async def test_a_client_that_leaves_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(say_hello) as port:
        for sent in (b"", b"GET / HT", get("/", "Content-Length: 9\r\n"), get("/")):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await writer.drain()
            writer.transport.abort()
        assert (await asked(port, get("/"))).endswith(b"hello")
    assert not caplog.text


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (get("/"), b"content-length: 5"),
        (get("/", "Content-Length: 100000\r\n") + bytes(100000), b"413"),
        (get("/", "Transfer-Encoding: chunked\r\n") + b"rubbish\r\n", b"400"),
    ],
    ids=["short", "long", "garbage"],
)
async def test_head_has_the_headers_of_an_answer_alone(
    sent: bytes, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(say_hello) as port:
        head, end, body = (await asked(port, sent.replace(b"GET", b"HEAD"))).partition(b"\r\n\r\n")
    assert said in head
    assert (end, body) == (b"\r\n\r\n", b"")
    assert not caplog.text


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n" + bytes(99999), 405),
        (get("/", "Content-Length: 100000\r\n") + bytes(100000), 413),
        (get("/", "Content-Length: 3\r\n") + b"abc", 200),
        (get("/", "X: " + "x" * 100000 + "\r\n"), 431),
        (get("/" + "x" * 100000), 431),
        (b"\x16\x03\x01garbage\r\n\r\n", 400),
    ],
    ids=["method", "long", "short", "header", "path", "garbage"],
)
async def test_a_request_of_any_size_is_answered(sent: bytes, status: int) -> None:
    async with serving(say_hello) as port:
        assert f" {status} ".encode() in (await asked(port, sent)).partition(b"\r\n")[0]
