"""A daemon with a page, and the requests of a browser."""

import http.client
import json
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from swapd_client import Client, connect
from tests.guarantees.harness import PATIENCE_S, Daemon

MIB = 1 << 20


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Served:
    """A daemon with a page at a port of its own."""

    def __init__(self, **settings: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="swapd-web-"))
        self.port = free_port()
        self._settings = settings
        self.start()

    def start(self) -> None:
        """Start the daemon, or start it again at the same port."""
        address = f"127.0.0.1:{self.port}"
        log = self.folder / "stderr"
        self.daemon = Daemon(self.folder / "run", log, http=address, **self._settings)
        assert self.daemon.greeting, self.daemon.log

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def connect(self, label: str = "worker") -> Client:
        return connect(self.daemon.folder, label=label)

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        """The answer to a request; underscores in names of headers become hyphens."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            line.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
            got = line.getresponse()
            return Answer(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
        finally:
            line.close()

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels, as they are printed."""
        lines = self.ask("/metrics").text.splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def plug(self) -> socket.socket:
        """A connection without any request yet."""
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)

    def close(self) -> None:
        try:
            self.daemon.close()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


class Updates:
    """The updates that a page gets."""

    def __init__(self, served: Served) -> None:
        self._line = http.client.HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE_S)
        self._line.request("GET", "/events")
        self._got = self._line.getresponse()
        assert self._got.headers["content-type"].startswith("text/event-stream")
        self.rows: dict[str, Any] = {}
        self.last: Any = None

    def __enter__(self) -> "Updates":
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def next(self) -> Any:
        while not (line := self._got.readline()).startswith(b"data: "):
            assert line, "the page's process has closed the connection"
        told = self.last = json.loads(line.removeprefix(b"data: "))
        self.rows.update({row["name"]: row for row in told.get("rows", ())})
        return told

    def until(self, name: str, **is_so: object) -> None:
        """Take updates until this row has these values."""
        while any(self.rows.get(name, {}).get(key) != value for key, value in is_so.items()):
            self.next()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """One daemon for all tests of a module; each test has components of its own."""
    one = Served()
    yield one
    one.close()
