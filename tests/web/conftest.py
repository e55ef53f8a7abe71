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

    def component(self, name: str) -> Any:
        """The component in `/status`; None if it is not there."""
        found = self.ask("/status").json["components"]
        return next((c for c in found if c["name"] == name), None)

    def until(self, name: str, **is_so: object) -> Any:
        """Ask until the component has these values; return it."""
        while (c := self.component(name)) is None or any(c[k] != v for k, v in is_so.items()):
            continue
        return c

    def records(self, after: int = 0, since: float = 0.0) -> Any:
        return self.ask(f"/records?after={after}&since={since}").json

    def plug(self) -> socket.socket:
        """A connection without any request yet."""
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)

    def close(self) -> None:
        try:
            self.daemon.close()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


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
