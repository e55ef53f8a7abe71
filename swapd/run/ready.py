"""Checks whether a server answers: on a port, a socket, or a page of it."""

import http.client
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from swapd.run.commands import Command, option
from swapd.shared.config import ConfigError

_ASKED_S = 1.0
_PORT = 8000
_HEALTH = "/health"
_TLS = ("--ssl-certfile", "--ssl-keyfile")


class ServerAddress(NamedTuple):
    """`path`: a unix socket. `page`: must answer too, if set."""

    host: str = "127.0.0.1"
    port: int = 0
    path: str = ""
    page: str = ""

    def __str__(self) -> str:
        at = self.path or f"{self.host}:{self.port}"
        return f"http://{at}{self.page}" if self.page else at


def of_server(command: Command) -> ServerAddress | None:
    if command.kind == "other":
        return None
    speaks_tls = any(option(command.words, name) for name in _TLS)
    page = "" if speaks_tls else _HEALTH
    if path := option(command.words, "--uds"):
        return ServerAddress(path=path, page=page)
    host = option(command.words, "--host") or "127.0.0.1"
    port = option(command.words, "--port") or str(_PORT)
    try:
        return _at("127.0.0.1" if host in ("0.0.0.0", "::") else host, port, page)
    except ValueError as exc:
        raise ConfigError(f"--host {host} --port {port}: {exc}") from exc


def parsed(text: str) -> ServerAddress:
    """Parse a port, HOST:PORT, a URL of HTTP, or the path of a unix socket. Raises: ConfigError."""
    try:
        if "://" in text:
            url = urlsplit(text)
            if url.scheme != "http":
                raise ValueError("it is asked by HTTP alone")
            page = f"{url.path or '/'}{f'?{url.query}' if url.query else ''}"
            return _at(url.hostname or "127.0.0.1", str(url.port or 80), page)
        if "/" in text:
            return ServerAddress(path=text)
        host, _, port = text.rpartition(":")
        return _at(host.strip("[]") or "127.0.0.1", port)
    except ValueError as exc:
        raise ConfigError(
            f"--ready {text}: write a port, HOST:PORT, http://HOST:PORT/PAGE or the path of a "
            f"socket ({exc})"
        ) from exc


def _at(host: str, port: str, page: str = "") -> ServerAddress:
    """Raises: ValueError if nothing can be connected to that."""
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError("it is no port: write a number from 1 to 65535")
    host.encode("idna")
    return ServerAddress(host, int(port), page=page)


def answers(address: ServerAddress) -> bool:
    """Tell whether it answers now. Blocks for at most a second, or as long as it sends."""
    try:
        with _connected(address) as connection:
            if not address.page:
                return True
            asked = http.client.HTTPConnection(address.host, address.port or 80, timeout=_ASKED_S)
            asked.sock = connection
            asked.request("GET", address.page)
            return asked.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False


def listens(address: ServerAddress) -> bool:
    return answers(address._replace(page=""))


def _connected(address: ServerAddress) -> socket.socket:
    if not address.path:
        return socket.create_connection((address.host, address.port), _ASKED_S)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_ASKED_S)
        connection.connect(address.path)
    except OSError:
        connection.close()
        raise
    return connection
