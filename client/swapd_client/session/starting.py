"""Opens a client's session, and starts a daemon if there is none; it ends after its last session.

The process that locks the file `starting` in the runtime folder starts the daemon, which inherits
and keeps that lock: so the starting process may die at any moment. Others wait.
"""

import fcntl
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TypeVar

from swapd.shared import config, runtime_dir
from swapd.shared.config import DEVICE_NAME
from swapd.shared.fds import OwnedFd
from swapd.shared.runtime_dir import ANOTHER, DAEMON_LOG, STARTING, Folder
from swapd.shared.text import plain
from swapd_client.checks import check
from swapd_client.errors import DaemonGone, InvalidArgument, NotRunning
from swapd_client.session.channel import POLL_MAX_S
from swapd_client.session.disabled import Disabled
from swapd_client.session.endpoint import label_of, resolve
from swapd_client.session.session import Session

T = TypeVar("T")
_pause = time.sleep

#: Seconds within which a daemon must serve: a large budget on a GPU takes seconds.
START_S = 120.0
#: Seconds that it stays without a session, unless $SWAPD_LINGER is set.
LINGER_S = 10.0
#: A process in between: it forks the daemon, prints the process id, and ends.
_BETWEEN = """
import os, sys
if pid := os.fork():
    print(pid)
else:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.execv(sys.argv[1], sys.argv[1:])
"""
AGAIN_S = 0.02
_LOG_MAX_BYTES = 1 << 20
_SAID_BYTES = 4096

_ADDRESS = re.compile(r"(\w+://)?[\w.-]+:\d+/?")


def open_session(
    endpoint: str | os.PathLike[str] | None,
    device: str | None,
    label: str | None,
    timeout: float,
    disabled: bool | None,
    *,
    start: bool,
    budget: int | str | None,
) -> Session:
    endpoint, device = _folder_or_device(endpoint, device)
    disabled = _is_disabled(disabled)
    _check(endpoint, device)
    if not (isinstance(timeout, (int, float)) and 0 < timeout <= POLL_MAX_S):
        raise InvalidArgument(
            f"timeout={timeout!r}: give the seconds to wait for the daemon's answer, more than 0 "
            f"and at most {POLL_MAX_S:g}"
        )
    if budget is not None and not start:
        raise InvalidArgument("budget= is for a daemon that connect starts: add start=True")
    called = label_of(label)
    if disabled:
        return Disabled(_private_device(device))
    folder = resolve(endpoint, device).absolute()  # the program may change its directory

    def again(within_s: float = inf) -> Session:
        opened = partial(Session, folder, called, min(timeout, within_s))
        return connected(folder, device, budget, opened) if start else opened()

    session = again()
    session.again = again
    return session


def seconds_to_wait(asked: float | None) -> float:
    """Return how long a client waits for the next daemon; None means `$SWAPD_RECONNECT`."""
    try:
        found = config.reconnect_s() if asked is None or asked is True else float(asked)
    except (config.ConfigError, TypeError, ValueError) as exc:
        raise InvalidArgument(f"reconnect={asked!r}: {exc}") from None
    if not 0 <= found < inf:
        raise InvalidArgument(f"reconnect={asked!r}: give a number of seconds; 0: do not wait")
    return found


def _folder_or_device(
    endpoint: str | os.PathLike[str] | None, device: str | None
) -> tuple[str | os.PathLike[str] | None, str | None]:
    if not isinstance(endpoint, str) or not DEVICE_NAME.fullmatch(endpoint):
        return endpoint, device
    if device not in (None, endpoint):
        raise InvalidArgument(f"connect({endpoint!r}, device={device!r}) names two devices")
    return None, endpoint


def _is_disabled(asked: bool | None) -> bool:
    if asked not in (None, True, False):
        raise InvalidArgument(f"disabled={asked!r}: give True, False or None")
    try:
        return config.is_disabled() if asked is None else asked
    except config.ConfigError as exc:
        raise InvalidArgument(str(exc)) from None


def _private_device(device: str | None) -> str:
    """Return the device whose memory has the components of a process without swapd."""
    device = device or config.variable(config.DEVICE_VARIABLE) or "host"
    if not DEVICE_NAME.fullmatch(device):
        raise InvalidArgument(
            f"${config.DEVICE_VARIABLE} is {device!r}: give a device, as in 'cuda:0', or 'host'"
        )
    return device


def _check(endpoint: str | os.PathLike[str] | None, device: str | None) -> None:
    check("endpoint", endpoint, str | os.PathLike | None, "a device, as in 'cuda:0', or a folder")
    check("device", device, str | None, "a device, as in 'cuda:0', or 'host'")
    if device is not None and not DEVICE_NAME.fullmatch(device):
        raise InvalidArgument(f"device={device!r}: give a device, as in 'cuda:0', or 'host'")
    if isinstance(endpoint, str) and _ADDRESS.fullmatch(endpoint) and not os.path.exists(endpoint):
        raise InvalidArgument(
            f"connect({endpoint!r}): a daemon serves its own machine alone, and has no address on "
            "the network. Give its device, as in 'cuda:0', or its folder, as `swapd ps` prints it"
        )


def connected(
    folder: Path, device: str | None, budget: int | str | None, connect: Callable[[], T]
) -> T:
    """Return the result of `connect`; start a daemon for `folder` first if there is none.

    Blocks until it serves. Raises: NotRunning if it does not in START_S, and other errors of
    `connect`.
    """
    give_up = time.monotonic() + START_S
    while True:
        try:
            return connect()
        except (NotRunning, DaemonGone) as exc:  # it may just have ended by itself
            if time.monotonic() > give_up:
                raise NotRunning(f"no swapd serves {folder} after {START_S:g} s: {exc}") from exc
        if not _start(folder, device, budget, give_up):
            _pause(AGAIN_S)


def _start(folder: Path, device: str | None, budget: int | str | None, give_up: float) -> bool:
    """Start a daemon and wait until it serves; False if another one starts or still ends."""
    try:
        with _made(folder) as opened, opened.open(STARTING, os.O_RDWR | os.O_CREAT) as lock:
            try:
                fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return _serve(opened, _command(folder, device, budget), lock, give_up)
    except OSError as exc:
        raise NotRunning(f"swapd cannot be started: {runtime_dir.refused(folder, exc)}") from exc


def _made(folder: Path) -> Folder:
    opened = Folder(folder, runtime_dir.open_folder(folder, make=True))
    if problem := runtime_dir.problem_with(opened):
        opened.close()
        raise NotRunning(f"swapd cannot be started: {problem}")
    return opened


def _command(folder: Path, device: str | None, budget: int | str | None) -> list[str]:
    if not sys.executable:
        raise NotRunning(
            "sys.executable is empty, so swapd cannot be started; run `swapd serve` yourself"
        )
    # -P: no imports from the working directory, which others may write to
    command = [sys.executable, "-P", "-m", "swapd", "serve", "--runtime-dir", str(folder)]
    if device is None and folder == config.default_folder("host"):
        device = "host"  # also beside a GPU
    command += [] if device is None else ["--device", device]
    return command if budget is None else [*command, "--budget", str(budget)]


def _serve(folder: Folder, command: list[str], lock: OwnedFd, give_up: float) -> bool:
    """Start the daemon, which inherits `lock`. Raises: NotRunning with the daemon's own message.

    Returns False if another daemon holds the folder without serving.
    """
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
        folder.open(DAEMON_LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND) as log,
    ):
        notify.bind("")  # the kernel picks a name, in no folder
        address = "@" + notify.getsockname()[1:].decode()
        begin = _begin(log)
        env = config.environment_of_a_daemon(address, linger=str(LINGER_S))
        pid = _launch(command, env, log, lock)
        ready = _ready(notify, pid, give_up)
        if not ready and time.monotonic() > give_up:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            raise NotRunning(
                f"swapd (process {pid}) did not serve {folder.path} within {START_S:g} s, and was "
                f"ended; its log is {folder.path / DAEMON_LOG}"
            )
        if not ready:
            said = os.pread(log.fileno(), _SAID_BYTES, begin).decode(errors="replace").strip()
            if ANOTHER in said:
                return False
            words = "; ".join(line.removeprefix("swapd: ") for line in said.splitlines()[-3:])
            raise NotRunning(f"swapd did not start: {plain(words) or 'it ended at once'}")
        return True


def _launch(command: list[str], env: dict[str, str], log: OwnedFd, lock: OwnedFd) -> int:
    """Start the daemon outside this process's children and session; return its process id.

    Ray and terminals, for example, end their children, or their group.
    """
    between = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _BETWEEN, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log.fileno(),
        env=env,
        pass_fds=[lock.fileno()],
        start_new_session=True,
        check=False,
    )
    if between.returncode:
        raise NotRunning(f"swapd did not start: {sys.executable} cannot be run a second time")
    return int(between.stdout)


def _begin(log: OwnedFd) -> int:
    nbytes = os.fstat(log.fileno()).st_size
    if nbytes <= _LOG_MAX_BYTES:
        return nbytes
    os.ftruncate(log.fileno(), 0)
    return 0


def _ready(notify: socket.socket, pid: int, give_up: float) -> bool:
    """Wait until the daemon reports that it serves; False if it ends or time is over."""
    try:
        ended = OwnedFd(os.pidfd_open(pid))
    except ProcessLookupError:
        return False
    with ended:
        return _heard(notify, ended, give_up)


def _heard(notify: socket.socket, ended: OwnedFd, give_up: float) -> bool:
    poll = select.poll()
    poll.register(notify, select.POLLIN)
    poll.register(ended.fileno(), select.POLLIN)
    while (left := give_up - time.monotonic()) > 0:
        heard = [fd for fd, _ in poll.poll(left * 1000)]
        if notify.fileno() in heard and notify.recv(256).startswith(b"READY=1"):
            return True
        if ended.fileno() in heard:
            return False
    return False
