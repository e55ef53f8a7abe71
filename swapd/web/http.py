"""Answers read-only HTTP requests, one per connection, within limits of time and number.

A connection has ASK_S to send its whole request and READ_S to take the answer. Beyond ASKING_MAX
without a complete request, the oldest is closed, so silent connections lock nobody out. Requests in
progress are limited too, with reserved places for some paths.

Without a token, on the loopback, a page of another site could make a browser ask here by its own
host name (DNS rebinding). So only the address's own names are served then.
"""

import asyncio
import base64
import hashlib
import hmac
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import h11

log = logging.getLogger("swapd.web")

#: Time limits for sending a request, and for reading an answer.
ASK_S = 10.0
READ_S = 10.0
#: Limit of connections without a complete request; beyond it the oldest is closed.
ASKING_MAX = 200
#: Limits of requests in progress, without and with reserved places.
ANSWERING_MAX = 64
KEPT_MAX = 16
HEADERS_MAX_BYTES = 16 << 10
BODY_MAX_BYTES = 4 << 10
#: Time and bytes for the rest of a refused request: if it stayed unread, the client would lose the
#: answer.
REST_S = 1.0
REST_MAX_BYTES = 256 << 10

Headers = Iterable[tuple[str, str]]


class HttpRequest(NamedTuple):
    """`query` is not decoded. Header names are in lower case. `bare`: without the answer's body."""

    path: str
    query: str
    headers: dict[str, str]
    bare: bool = False


class Answer(NamedTuple):
    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class _Refused(Exception):
    def __init__(self, answer: Answer, *, bare: bool = False) -> None:
        super().__init__()
        self.answer, self.bare = answer, bare


class Server:
    def __init__(
        self,
        answer: Callable[[HttpRequest], Awaitable[Answer]],
        headers: Headers = (),
        kept: Iterable[str] = (),
    ) -> None:
        """`headers` go with every answer. `kept`: paths with reserved places."""
        self._answer = answer
        self._headers = [("connection", "close"), *headers]
        self._kept = frozenset(kept)
        #: Connections without a complete request, oldest first.
        self._asking: dict[asyncio.StreamWriter, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: Requests in progress, by whether they have a reserved place.
        self._answering = {False: 0, True: 0}

    async def serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(
            self._connected, sock=listening, limit=HEADERS_MAX_BYTES
        )
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._talk(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the client is gone or too slow, or the server ends
        except Exception:
            log.exception("a request failed")
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADERS_MAX_BYTES)
        self._asking[writer] = None
        if len(self._asking) > ASKING_MAX:
            next(iter(self._asking)).transport.abort()
        try:
            async with asyncio.timeout(ASK_S):
                request = await _request(connection, reader)
        except _Refused as refused:
            async with asyncio.timeout(REST_S):
                await self._send(connection, writer, refused.answer, bare=refused.bare)
                await _read_rest(reader, writer)
            return
        finally:
            self._asking.pop(writer, None)
        if request is not None:
            await self._respond(connection, writer, request)

    async def _respond(
        self, connection: h11.Connection, writer: asyncio.StreamWriter, request: HttpRequest
    ) -> None:
        kept = request.path in self._kept
        is_full = self._answering[kept] >= (KEPT_MAX if kept else ANSWERING_MAX)
        self._answering[kept] += 1
        try:
            full = Answer(503, b"too many requests at once\n")
            answer = full if is_full else await self._answer(request)
            async with asyncio.timeout(READ_S):
                await self._send(connection, writer, answer, bare=request.bare)
                writer.close()
                await writer.wait_closed()
        finally:
            self._answering[kept] -= 1

    async def _send(
        self,
        connection: h11.Connection,
        writer: asyncio.StreamWriter,
        answer: Answer,
        *,
        bare: bool,
    ) -> None:
        headers = [
            ("content-type", answer.kind),
            ("content-length", str(len(answer.body))),
            *answer.headers,
            *self._headers,
        ]
        response = h11.Response(status_code=answer.status, headers=headers)
        data = h11.Data(data=b"" if bare else answer.body)
        for event in (response, data, h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        await writer.drain()


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> HttpRequest | None:
    request, nbytes = None, 0
    while True:
        try:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(HEADERS_MAX_BYTES))
                continue
        except h11.RemoteProtocolError as exc:
            status = 431 if exc.error_status_hint == 431 else 400
            answer = Answer(status, b"this is no HTTP request\n")
            raise _Refused(answer, bare=_is_bare(request)) from None
        match event:
            case h11.Request():
                request = event
                _check_method(event)
            case h11.Data():
                nbytes += len(event.data)
                if nbytes > BODY_MAX_BYTES:
                    raise _Refused(Answer(413, b"too long\n"), bare=_is_bare(request))
            case h11.EndOfMessage() if request is not None:
                return _parsed(request)
            case _:
                return None


def _check_method(request: h11.Request) -> None:
    if request.method not in (b"GET", b"HEAD"):
        allow = (("allow", "GET, HEAD"),)
        raise _Refused(Answer(405, b"only to be read\n", headers=allow))


def _parsed(request: h11.Request) -> HttpRequest:
    path, _, query = request.target.decode("ascii", "replace").partition("?")
    headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in request.headers}
    return HttpRequest(path, query, headers, _is_bare(request))


def _is_bare(request: h11.Request | None) -> bool:
    return request is not None and request.method == b"HEAD"


async def _read_rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.write_eof()
    nbytes = 0
    while nbytes < REST_MAX_BYTES and (some := await reader.read(HEADERS_MAX_BYTES)):
        nbytes += len(some)


#: Paths without a token: they reveal only that a swapd is here.
OPEN = ("/", "/healthz")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class AccessRules:
    def __init__(self, token: str, host: str) -> None:
        """`token`: "" if none is needed. `host`: the IP address or name that is served."""
        self._token = token.encode()
        self._names = (*_LOOPBACK, f"[{host}]" if ":" in host else host)

    def refusal(self, request: HttpRequest) -> Answer | None:
        asked = request.headers.get
        if asked("sec-fetch-site") == "cross-site" and asked("sec-fetch-mode") != "navigate":
            return Answer(403, b"not for pages of other sites\n")
        if not self._token:
            if _name(asked("host", "")) in self._names:
                return None
            return Answer(421, f"ask for it by {' or '.join(self._names[:2])}\n".encode())
        kind, _, given = asked("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(errors="replace"), self._token)
        if request.path in OPEN or (kind.lower() == "bearer" and same):
            return None
        about = (("www-authenticate", 'Bearer realm="swapd"'),)
        return Answer(401, b"a token is needed: Authorization: Bearer ...\n", headers=about)


def _name(host: str) -> str:
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.partition(":")[0].lower()


def headers_for(page: str) -> Headers:
    """Return the headers of every answer: browsers load and run only the page's own parts, show it
    in no other page, and keep nothing."""
    allowed = {
        kind: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        )
        for kind in ("script", "style")
    }
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "img-src data:; connect-src 'self'; form-action 'none'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )
    return [
        ("cache-control", "no-store"),
        ("content-security-policy", policy),
        ("referrer-policy", "no-referrer"),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
    ]
