"""The page's process: its answers and its lifetime.

Asks the daemon for a status every second, to keep marks of the past, and for a request if the last
status is older than FRESH_S.
"""

import asyncio
import logging
import os
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing, suppress
from importlib.resources import files
from pathlib import Path

import msgspec

from swapd.cli.common import encoded_json
from swapd.cli.conclusions import report
from swapd.cli.last_lines import LastLines, LogEntry
from swapd.cli.page import PageSettings
from swapd.shared import fds
from swapd.shared.protocol import ComponentStatus, Status
from swapd.web import metrics
from swapd.web.http import AccessRules, Answer, HttpRequest, Server, headers_for
from swapd_client import Client, SwapdError, connect

#: Seconds of the past that are kept, and limit of marks of a component.
PAST_S = 300.0
MARKS_MAX = 600
ROWS_MAX = 500

#: Codes of states: loading, held, leaving; `r` for others on the device.
_CODES = {"loading": "l", "lending": "l", "lent": "h", "leased": "h"}
_CODES |= dict.fromkeys(("stopping", "revoking", "writing back", "reclaiming"), "v")

#: Unix time, code (`o`: not on the device), and the share on the device.
Mark = tuple[float, str, float]


class ResidencyHistory:
    def __init__(self) -> None:
        self._marks: dict[str, deque[Mark]] = {}

    def note(self, components: Iterable[ComponentStatus], now: float) -> None:
        rows: dict[str, list[ComponentStatus]] = {}
        for c in components:
            rows.setdefault(c.part_of or c.name, []).append(c)
        for name in self._marks.keys() - rows.keys():
            del self._marks[name]
        for name, parts in rows.items():
            if name in self._marks or len(self._marks) < ROWS_MAX:
                marks = self._marks.setdefault(name, deque(maxlen=MARKS_MAX))
                _add(marks, (round(now, 2), *_state(parts)), now)

    def since(self, time: float) -> dict[str, list[Mark]]:
        found = {name: [m for m in marks if m[0] > time] for name, marks in self._marks.items()}
        return {name: marks for name, marks in found.items() if marks}


def _add(marks: deque[Mark], mark: Mark, now: float) -> None:
    if not marks or marks[-1][1:] != mark[1:]:
        marks.append(mark)
    while len(marks) > 1 and marks[1][0] < now - PAST_S:
        marks.popleft()


def _state(parts: list[ComponentStatus]) -> tuple[str, float]:
    inside = [part for part in parts if part.inside]
    codes = {_CODES.get(part.state, "r") for part in inside}
    nbytes = sum(part.nbytes for part in parts)
    share = sum(part.nbytes for part in inside) / nbytes if nbytes else float(bool(inside))
    return next((code for code in "hlvr" if code in codes), "o"), round(share, 2)


log = logging.getLogger("swapd.web")

#: Like a command's label: its sessions are not workers.
LABEL = "swapd http"
#: Time limits for a connection to the daemon, and for a status.
CONNECT_S = 10.0
ANSWER_S = 5.0
#: A status younger than FRESH_S is used again. A scrape waits SCRAPE_S for a new one, then gets the
#: last with its age.
FRESH_S = 0.4
SCRAPE_S = 1.0
#: Seconds between statuses while nobody asks; at least SAMPLE_PAUSES times as long as the last one
#: took.
SAMPLE_S = 1.0
SAMPLE_PAUSES = 20
LINES = 60
#: Seconds that a daemon may take to stop after it has ended all sessions.
END_S = 10.0
#: Niceness, in favour of the daemon.
NICE = 5
#: Prometheus and probes get an answer however many pages are open.
KEPT = ("/healthz", "/metrics")


class StatusFeed:
    """The daemon's last status and what goes with it. Sends the daemon one request at a time, for
    any number of tasks."""

    def __init__(self, client: Client) -> None:
        """Ask for the first status. Blocks. Raises: SwapdError."""
        self._client = client
        self.past = ResidencyHistory()
        self.status: Status
        self.lines: tuple[LogEntry, ...] = ()
        self._asking: asyncio.Task[SwapdError | None] | None = None
        self._take(client.status(timeout=CONNECT_S))
        self._log = LastLines(Path(self.status.swap_log), LINES)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._at

    def _take(self, status: Status) -> None:
        self.status, self._at = status, time.monotonic()
        self.past.note(status.components, _clock())

    async def ask(self, within_s: float = ANSWER_S) -> Status:
        """Return a status at most FRESH_S old. Raises: SwapdError; TimeoutError."""
        if self.age_s > FRESH_S:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.get_running_loop().create_task(self._ask(), name="status")
            async with asyncio.timeout(within_s):
                if (error := await asyncio.shield(self._asking)) is not None:
                    raise error
        return self.status

    async def _ask(self) -> SwapdError | None:
        """Return an error instead of raising it, because perhaps nobody waits for this task any
        more."""
        try:
            status = await asyncio.to_thread(self._client.status, timeout=ANSWER_S)
        except SwapdError as exc:
            return exc
        await asyncio.to_thread(self._log.read, status.sessions)
        self._take(status)
        self.lines = tuple(self._log.lines)
        return None

    async def sample(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.ask()
            except (SwapdError, TimeoutError) as exc:
                log.debug("no status: %s", exc)
            took = time.monotonic() - began
            await asyncio.sleep(max(SAMPLE_S, SAMPLE_PAUSES * took))

    def close(self) -> None:
        self._log.close()


class Site:
    def __init__(self, watched: StatusFeed, access: AccessRules) -> None:
        self.page = files("swapd.web").joinpath("page.html").read_text("utf-8")
        self._watched = watched
        self._access = access
        self._paths: dict[str, Callable[[HttpRequest], Awaitable[Answer]]] = {
            "/": self._show,
            "/healthz": self._healthz,
            "/status": self._status,
            "/records": self._records,
            "/metrics": self._metrics,
        }

    async def answer(self, request: HttpRequest) -> Answer:
        if (refusal := self._access.refusal(request)) is not None:
            return refusal
        if (path := self._paths.get(request.path)) is None:
            return Answer(404, b"nothing is here\n")
        try:
            return await path(request)
        except (SwapdError, TimeoutError) as exc:
            return Answer(503, f"the daemon does not answer: {exc}\n".encode())

    async def _show(self, request: HttpRequest) -> Answer:
        return Answer(200, self.page.encode(), "text/html; charset=utf-8")

    async def _healthz(self, request: HttpRequest) -> Answer:
        try:
            await self._watched.ask()
        except (SwapdError, TimeoutError):  # it needs no token, so it says no more
            return Answer(503, b"the daemon does not answer\n")
        return Answer(200, b"ok\n")

    async def _status(self, request: HttpRequest) -> Answer:
        told = report(await self._watched.ask())
        return Answer(200, encoded_json(told), "application/json")

    async def _records(self, request: HttpRequest) -> Answer:
        after, since = _number(request.query, "after"), _number(request.query, "since")
        lines = [
            {
                "seq": seq,
                "t": at,
                "verb": said.verb,
                "subject": said.subject,
                "detail": " ".join(said.detail.split()),
                "style": said.style,
            }
            for seq, at, said in self._watched.lines
            if seq > after
        ]
        marks = self._watched.past.since(since)
        told = {"now": _clock(), "run": os.getpid(), "lines": lines, "marks": marks}
        return Answer(200, msgspec.json.encode(told), "application/json")

    async def _metrics(self, request: HttpRequest) -> Answer:
        watched = self._watched
        try:
            await watched.ask(SCRAPE_S)
        except (SwapdError, TimeoutError):
            log.debug("the daemon did not answer a scrape in time")
        accept = request.headers.get("accept", "")
        return Answer(200, *metrics.render(watched.status, watched.age_s, accept))


def _number(query: str, name: str) -> float:
    found = re.search(rf"(?:^|&){name}=([0-9]{{1,15}}(?:\.[0-9]{{0,15}})?)(?:&|$)", query)
    return float(found[1]) if found else 0.0


def main(settings: bytes) -> None:
    """Serve until the daemon ends, or the process that started this one, which closes standard
    input.

    `settings`: a `PageSettings`, as JSON.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the daemon gets them, and ends this process
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    fds.raise_limit()
    try:
        asyncio.run(_serve(msgspec.json.decode(settings, type=PageSettings)))
    except SwapdError as exc:
        sys.exit(f"swapd: the page: {exc}")


async def _serve(settings: PageSettings) -> None:
    folder = Path(settings.folder)
    client = await asyncio.to_thread(connect, folder, label=LABEL, timeout=CONNECT_S)
    try:
        with closing(await asyncio.to_thread(StatusFeed, client)) as watched:
            await _serve_until_the_end(watched, client, settings)
    finally:
        await asyncio.to_thread(client.close)


async def _serve_until_the_end(watched: StatusFeed, client: Client, settings: PageSettings) -> None:
    site = Site(watched, AccessRules(settings.token, settings.host))
    server = Server(site.answer, headers_for(site.page), KEPT)
    told_to_end, over = asyncio.Event(), asyncio.Event()
    _when_readable(sys.stdin.fileno(), told_to_end, over)
    _when_readable(client.session.life.ended.fileno(), over)
    with socket.socket(fileno=settings.fd) as listening:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(listening), name="http")
            sampling = tasks.create_task(watched.sample(), name="status")
            await over.wait()
            with suppress(TimeoutError):  # the daemon ends this process when it has stopped
                async with asyncio.timeout(END_S):
                    await told_to_end.wait()
            serving.cancel()
            sampling.cancel()


def _when_readable(fd: int, *events: asyncio.Event) -> None:
    """Set the events once `fd` has data, which stays unread, or has ended."""
    loop = asyncio.get_running_loop()

    def is_readable() -> None:
        loop.remove_reader(fd)
        for event in events:
            event.set()

    loop.add_reader(fd, is_readable)


def _clock() -> float:
    return time.time()  # noqa: TID251 - records have wall time
