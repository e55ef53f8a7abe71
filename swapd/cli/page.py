"""The daemon's side of its page (`swapd serve --http`): address, token, and the serving process.

The daemon itself listens, so that a bad address is an error at its start. A thread of the daemon
starts the process that answers (`swapd.web`), and restarts it when it ends.
"""

import errno
import importlib.util
import ipaddress
import logging
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from swapd.shared import system
from swapd.shared.config import HTTP_TOKEN_VARIABLE, Config, ConfigError, variable
from swapd.shared.extras import EXTRA_OF, needed
from swapd.shared.fds import OwnedFd

log = logging.getLogger("swapd.page")

#: Bounds of a token's length: a shorter token can be guessed; a longer token is a mistake.
TOKEN_MIN = 16
TOKEN_MAX = 1024
BACKLOG = 128
#: Seconds of retries to bind: the address of a daemon that just ended may still be in use.
TAKEN_S = 2.0
CLOSE_S = 3.0
#: Pauses before the process is restarted; they double while it keeps ending soon.
AGAIN_S = 1.0
AGAIN_MAX_S = 60.0

#: The process imports from this process's `sys.path`, however that was set.
_PROGRAM = """\
import json, sys
settings = sys.stdin.buffer.readline()
sys.path[:] = json.loads(settings)["path"]
from swapd.web.serving import main
main(settings)
"""


class Address(NamedTuple):
    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class PageSettings(msgspec.Struct, frozen=True):
    """Settings of the serving process, sent by standard input, which no other process can read."""

    folder: str
    fd: int
    host: str
    token: str
    path: list[str]


class Page:
    """Listens from its construction, and answers from `start` to `close`."""

    def __init__(self, address: Address, token: str) -> None:
        """Raises: ConfigError if the address is not available."""
        self._token = token
        self._socket = _listening(address)
        self.address = address._replace(port=self._socket.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="swapd-page", daemon=True)

    @property
    def url(self) -> str:
        return f"http://{self.address}/"

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def start(self, folder: Path) -> None:
        """Start the serving process, a client of the daemon in `folder`. Does not block.

        Raises: LimitError.
        """
        paths = [str(Path(entry).absolute()) for entry in sys.path]
        fd, host = self._socket.fileno(), self.address.host
        settings = PageSettings(str(folder), fd, host, self._token, paths)
        self._settings = msgspec.json.encode(settings) + b"\n"
        system.start(self._thread)

    def close(self) -> None:
        """Blocks for at most CLOSE_S."""
        with self._lock:
            self._closing.set()
            process = self._process
        self._socket.close()
        if process is not None:
            _end(process)

    def _keep(self) -> None:
        wait_s = AGAIN_S
        while True:
            began = time.monotonic()
            try:
                process = self._begin()
            except OSError as exc:
                why = str(exc.strerror)
            else:
                if process is None:
                    return
                why = f"it ended with {process.wait()}"
            if time.monotonic() - began > AGAIN_MAX_S:
                wait_s = AGAIN_S
            if self._closing.wait(0):
                return
            log.warning("the page's process: %s; started again in %g s", why, wait_s)
            if self._closing.wait(wait_s):
                return
            wait_s = min(2 * wait_s, AGAIN_MAX_S)

    def _begin(self) -> "subprocess.Popen[bytes] | None":
        with self._lock:
            if self._closing.is_set():
                return None
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(self._socket.fileno(),),
                start_new_session=True,
            )
        assert process.stdin is not None
        process.stdin.write(self._settings)
        process.stdin.flush()
        return process


def open_page(config: Config) -> Page | None:
    """Listen at the address in the settings; return None without an address.

    Raises: ConfigError; MissingExtra.
    """
    found = reachable(config)
    return found and Page(*found)


def reachable(config: Config) -> tuple[Address, str] | None:
    """Return the address of the page and its token; None without a page. Raises: as `open_page`."""
    if config.http is None:
        return None
    address = parse_address(config.http)
    token = _token(config)
    if not token and not address.loopback:
        raise ConfigError(
            f"--http: {address} is open to other machines, so a token is needed: set "
            "--http-token-file or $SWAPD_HTTP_TOKEN, or serve it at 127.0.0.1"
        )
    with needed("swapd serve --http"):
        for module in (name for name, extra in EXTRA_OF.items() if extra == "web"):
            if importlib.util.find_spec(module) is None:
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    return address, token


def parse_address(text: str) -> Address:
    """Raises: ConfigError."""
    match = re.fullmatch(r"(?:\[(?P<six>[^]]+)\]|(?P<four>[^:]*)):(?P<port>[0-9]{1,5})", text)
    if match is not None and int(match["port"]) < 1 << 16:
        host = match["six"] or match["four"]
        try:
            return Address(
                host if host == "localhost" else str(ipaddress.ip_address(host)), int(match["port"])
            )
        except ValueError:
            pass
    raise ConfigError(
        f"--http: {text!r} is not an address; write an IP address and a port, as in 127.0.0.1:9470"
    )


def _token(config: Config) -> str:
    if config.http_token_file is not None:
        where = f"--http-token-file: {config.http_token_file}"
        try:
            token = _read_secret(config.http_token_file).decode("ascii", "strict").strip()
        except OSError as exc:
            raise ConfigError(f"{where}: {exc.strerror}") from exc
        except UnicodeDecodeError as exc:
            raise ConfigError(f"{where}: a token may have ASCII characters only") from exc
    else:
        where, token = "$SWAPD_HTTP_TOKEN", variable(HTTP_TOKEN_VARIABLE) or ""
        if not token:
            return ""
    if not TOKEN_MIN <= len(token) <= TOKEN_MAX or not re.fullmatch(r"[!-~]+", token):
        raise ConfigError(
            f"{where}: a token has {TOKEN_MIN} to {TOKEN_MAX} ASCII characters and no space; make "
            "one: openssl rand -hex 24"
        )
    return token


def _read_secret(path: str) -> bytes:
    """Read the beginning of a file that belongs to this user or root, that its group cannot write,
    and that others can neither read nor write. Raises: ConfigError, OSError."""
    with OwnedFd(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"--http-token-file: {path} is no file")
        if found.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"--http-token-file: {path} belongs to another user (see chown)")
        if found.st_mode & 0o027:
            raise ConfigError(
                f"--http-token-file: other users can read or change {path}: chmod 600 {path}"
            )
        return os.read(file.fileno(), TOKEN_MAX + 2)


def _listening(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    host = "127.0.0.1" if address.host == "localhost" else address.host
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    give_up = time.monotonic() + TAKEN_S
    while True:
        try:
            listening.bind((host, address.port))
            listening.listen(BACKLOG)
            return listening
        except OSError as exc:
            if time.monotonic() < give_up and exc.errno == errno.EADDRINUSE:
                time.sleep(0.05)
                continue
            listening.close()
            raise ConfigError(f"--http: {address}: {exc.strerror}; choose another") from exc


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.close()  # this ends the process
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
