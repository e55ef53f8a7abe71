"""The page's process: its HTTP routes, and its lifetime.

Lives here: joining feed, picture and HTTP. May not live here: their decisions.
"""

import asyncio
import base64
import hashlib
import logging
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from swapd.cli.common import encoded_json
from swapd.cli.page import Told
from swapd.shared import fds
from swapd.shared.protocol import StatusReply
from swapd.web import guard, metrics
from swapd.web.door import Door
from swapd.web.feed import Feed
from swapd.web.live import Live
from swapd_client import SwapdError

log = logging.getLogger("swapd.web")

#: Most pages open at the same time.
VIEWERS_MAX = 32
#: A newer status is used again; while pages are open, it is refreshed every LOOK_S.
FRESH_S = 0.5
LOOK_S = 5.0
#: Seconds that the daemon may take for a status.
ANSWER_S = 5.0
#: Seconds that a daemon may take to stop after it has ended all sessions.
END_S = 10.0
#: This process's niceness, in favour of the daemon.
NICE = 5
#: Longest wait of a scrape for a status: then it uses the last one, with its age.
SCRAPE_S = 1.0


class Memory:
    """The daemon's status: one request at a time, however many tasks want it."""

    def __init__(self, feed: Feed) -> None:
        self._client = feed.client
        self.last = feed.status
        self._at = time.monotonic()
        self._asking: asyncio.Task[SwapdError | None] | None = None

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._at

    async def ask(self, within_s: float = ANSWER_S) -> StatusReply:
        """The current status, at most FRESH_S old. Raises: SwapdError; TimeoutError."""
        if self.age_s > FRESH_S:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.get_running_loop().create_task(self._ask(), name="status")
            async with asyncio.timeout(within_s):
                if (error := await asyncio.shield(self._asking)) is not None:
                    raise error
        return self.last

    async def _ask(self) -> SwapdError | None:
        """Ask; return an error instead of raising it, because no task may wait any more."""
        try:
            self.last = await asyncio.to_thread(self._client.status, timeout=ANSWER_S)
        except SwapdError as exc:
            return exc
        self._at = time.monotonic()
        return None


class Site:
    """The routes of the page."""

    def __init__(self, live: Live, memory: Memory) -> None:
        self._live = live
        self._memory = memory
        self._page = files("swapd.web").joinpath("page.html").read_text("utf-8")

    def app(self, token: str, *, loopback: bool) -> Door:
        routes = [
            Route("/", self._show),
            Route("/events", self._events),
            Route("/healthz", self._healthz),
            Route("/status", self._status),
            Route("/metrics", self._metrics),
        ]
        return Door(Starlette(routes=routes), token, loopback=loopback, policy=_policy(self._page))

    async def _show(self, request: Request) -> Response:
        return HTMLResponse(self._page)

    async def _events(self, request: Request) -> Response:
        if self._live.viewers >= VIEWERS_MAX:
            return PlainTextResponse(f"{VIEWERS_MAX} pages are open already\n", 503)
        return StreamingResponse(self._live.updates(), media_type="text/event-stream")

    async def _healthz(self, request: Request) -> Response:
        try:
            await self._memory.ask()
        except (SwapdError, TimeoutError):
            return PlainTextResponse("the daemon does not answer\n", 503)
        return PlainTextResponse("ok\n")

    async def _status(self, request: Request) -> Response:
        try:
            status = await self._memory.ask()
        except (SwapdError, TimeoutError) as exc:
            return PlainTextResponse(f"the daemon does not answer: {exc}\n", 503)
        return Response(encoded_json(status), media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        memory = self._memory
        try:
            await memory.ask(SCRAPE_S)
        except (SwapdError, TimeoutError):
            log.debug("the daemon did not answer a scrape in time")
        told = metrics.Told(memory.last, memory.age_s)
        accept = request.headers.get("accept", "")
        text, kind = metrics.render(self._live.picture, told, _clock(), accept)
        return Response(text, headers={"content-type": kind})


def main(settings: bytes) -> None:
    """Serve until the daemon ends, or the process that started this one: then standard input ends.

    `settings`: a `Told`, as JSON.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the daemon gets them, and ends this process
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of invalid requests
    fds.raise_limit()
    try:
        asyncio.run(_serve(msgspec.json.decode(settings, type=Told)))
    except* SwapdError as errors:
        sys.exit(f"swapd: the page: {errors.exceptions[0]}")


async def _serve(told: Told) -> None:
    feed = await asyncio.to_thread(Feed, Path(told.folder))
    try:
        await _watch(feed, told)
    finally:
        await asyncio.to_thread(feed.close)


async def _watch(feed: Feed, told: Told) -> None:
    told_to_end = _readable(sys.stdin.fileno())
    ended = _readable(feed.client.session.life.ended.fileno())
    live, memory = Live(feed.status, _clock), Memory(feed)
    server = guard.server(Site(live, memory).app(told.token, loopback=told.loopback))
    async with asyncio.TaskGroup() as tasks:
        others = [
            tasks.create_task(feed.run(live.take, live.missed), name="records"),
            tasks.create_task(_look(memory, live), name="memory"),
            tasks.create_task(server.watch(), name="guard"),
        ]
        await _first(feed.begun, told_to_end)
        with socket.socket(fileno=told.fd) as listening:
            serving = tasks.create_task(server.serve([listening]), name="http")
            await _end(told_to_end, ended)
            live.close()
            server.should_exit = True
            await serving
        for task in others:
            task.cancel()


def _readable(fd: int) -> asyncio.Event:
    """An event that is set once `fd` has data or has ended; the data stays unread."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def is_readable() -> None:
        loop.remove_reader(fd)
        event.set()

    loop.add_reader(fd, is_readable)
    return event


async def _end(told_to_end: asyncio.Event, ended: asyncio.Event) -> None:
    """Wait until this process is told to end, or its session has ended for long enough."""
    await _first(told_to_end, ended)
    with suppress(TimeoutError):  # a daemon ends this process when it has stopped
        async with asyncio.timeout(END_S):
            await told_to_end.wait()


async def _first(*events: asyncio.Event) -> None:
    """Wait for any of the events."""
    loop = asyncio.get_running_loop()
    waits = [loop.create_task(event.wait(), name="event") for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


async def _look(memory: Memory, live: Live) -> None:
    """Refresh the status while pages are open."""
    while True:
        if live.viewers or live.picture.uncertain:
            try:
                live.told(await memory.ask())
            except (SwapdError, TimeoutError) as exc:
                log.debug("no status: %s", exc)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await live.looked_at.wait()
        live.looked_at.clear()


def _clock() -> float:
    return time.time()  # noqa: TID251 - records have wall time


def _policy(page: str) -> str:
    """The content security policy: a browser may load and run only the page's own parts."""
    allowed = {
        kind: " ".join(f"'sha256-{_digest(text)}'" for text in re.findall(pattern, page, re.DOTALL))
        for kind, pattern in (
            ("script", r"<script>(.*?)</script>"),
            ("style", r"<style>(.*?)</style>"),
        )
    }
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        "img-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
