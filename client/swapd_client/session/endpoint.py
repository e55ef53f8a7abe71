"""Finds the daemon's endpoint, and opens the first connection to it."""

import math
import os
import re
import socket
import struct
import sys
import threading
from pathlib import Path

from swapd.shared import config, daemons, fds, runtime_dir
from swapd.shared.runtime_dir import Folder, Untrusted
from swapd.shared.system import OF_THREADS, LimitError, is_stopped, start
from swapd.shared.text import TEXT_MAX_CHARS, plain, problem_with_text
from swapd_client.checks import check
from swapd_client.errors import InvalidArgument, LimitReached, NotRunning, Timeout
from swapd_client.interrupts import to_its_end

#: Labels of swapd's own commands begin so; they belong to no stage.
_COMMAND_LINE = "swapd"
_PROGRAM_MAX_CHARS = TEXT_MAX_CHARS - 20


def resolve(endpoint: str | os.PathLike[str] | None, device: str | None) -> Path:
    """Return the folder: as given, `$SWAPD_ENDPOINT`, the device's, or the running daemon's.

    Raises: InvalidArgument if several daemons run.
    """
    if endpoint is not None:
        return Path(endpoint)
    if named := config.endpoint_from_environment():
        return Path(named)
    if device is not None:
        return config.default_folder(device)
    try:
        return daemons.usual_folder()
    except daemons.SeveralDaemons as exc:
        raise InvalidArgument(str(exc)) from None


def default_label() -> str:
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return f"{plain(program)[:_PROGRAM_MAX_CHARS]}:{os.getpid()}"


def label_of(label: str | None) -> str:
    """Return the session's label, after the name of its stage in `swapd run FILE`.

    Raises: InvalidArgument if no daemon takes the label.
    """
    check("label", label, str | None, "a text that names this process")
    label = label or default_label()
    if problem := problem_with_text("the label", label):
        raise InvalidArgument(problem)
    stage = config.variable(config.STAGE_VARIABLE)
    if stage is None or label.partition(" ")[0] == _COMMAND_LINE:
        return label
    return f"{stage}/{label}"[:TEXT_MAX_CHARS]


def need_descriptors(count: int, what: str) -> None:
    """Raise LimitReached unless this process may open `count` more descriptors.

    For actions that cannot fail halfway: without a descriptor libzmq ends the process, and a
    lifeline message that cannot be received ends the session.
    """
    try:
        fds.make_sure(count)
    except OSError as exc:
        raise LimitReached(
            f"{what} needs up to {count} more open files than this process has, and its limit is "
            f"{fds.limit()} ({exc.strerror}): raise its `ulimit -n`, or close some. Nothing "
            "has changed"
        ) from exc


def need_threads(count: int, what: str) -> None:
    """Raise LimitReached unless this process may start `count` threads and one more.

    Without a thread libzmq ends the process. The reserve is for the allocators' memory, and for a
    thread that the program starts meanwhile.
    """
    leave = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count + 1):
            thread = threading.Thread(target=leave.wait, name="swapd-check", daemon=True)
            start(thread)
            started.append(thread)
    except LimitError as exc:
        raise LimitReached(
            f"{what} needs {count} more threads, and the system grants this process "
            f"{len(started)}: raise {OF_THREADS}. Nothing was changed"
        ) from exc
    finally:
        to_its_end(leave.set)
        for thread in started:
            thread.join()


def find(path: Path) -> Folder:
    """Open the runtime folder; the caller closes it. Raises: NotRunning."""
    try:
        return runtime_dir.find(path)
    except OSError as exc:
        raise _not_running(path, exc) from exc


def open_lifeline(folder: Folder, timeout_s: float) -> tuple[socket.socket, int]:
    """Return a lifeline, and the daemon's process id. Blocks while others wait to be accepted.

    Raises: NotRunning, Timeout.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # settimeout would make connect fail at once while others wait
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
        sock.connect(str(folder.inside / runtime_dir.LIFELINE))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0.0))
    except BlockingIOError as exc:
        sock.close()
        raise not_answering(folder, timeout_s) from exc
    except OSError as exc:
        sock.close()
        raise _not_running(folder.path, exc) from exc
    pid, uid = fds.peer_of(sock)
    if uid != os.getuid():
        sock.close()
        raise NotRunning(
            f"the process at {folder.path} runs as user {uid}, not as this one: it gets no "
            "weights. Start a swapd as this user, or connect(path) to the right folder"
        )
    return sock, pid


def _not_running(path: Path, exc: OSError) -> NotRunning:
    if isinstance(exc, Untrusted):
        return NotRunning(
            f"{path} is not used: {exc}, so another user could be behind it. Start a swapd as this "
            "user in a folder of its own, and connect(path) to that"
        )
    if isinstance(exc, PermissionError):
        return NotRunning(
            f"{path} belongs to another user, and swapd serves only its own user "
            f"({exc.strerror}); start one as this user"
        )
    return NotRunning(
        f"no swapd at {path} ({exc.strerror or exc}){_elsewhere(path)}. Start one: "
        f"{_command(path)}; or give its folder: connect(path) or ${config.ENDPOINT_VARIABLE}"
        f"{_in_a_container(path)}"
    )


def not_answering(folder: Folder, timeout_s: float, pid: int | None = None) -> Timeout:
    pid = pid or folder.holder()
    who = f"the daemon at {folder.path} (process {pid or 'unknown'})"
    if pid and is_stopped(pid):
        return Timeout(
            f"{who} does not answer: it is stopped. Let it go on: kill -CONT {pid}; or end it: "
            f"kill -KILL {pid}"
        )
    return Timeout(
        f"{who} does not answer within {timeout_s:g} s: it is busy, or its device hangs. Wait, or "
        "give it more time; if it never answers, end it and start it again"
    )


def _timeval(seconds: float) -> bytes:
    whole, rest = divmod(math.ceil(seconds * 1e6), 1_000_000)  # round up, because 0 means for ever
    return struct.pack("@ll", whole, rest)


def _command(folder: Path) -> str:
    numbered = re.fullmatch(r"(?:cuda|gpu)(\d+)", folder.name)
    device, budget = (f"cuda:{numbered[1]}", "40GiB") if numbered else ("host", "1GiB")
    where = "" if folder == config.default_folder(device) else f" --runtime-dir {folder}"
    return f"swapd serve --device {device} --budget {budget}{where}"


def _elsewhere(folder: Path) -> str:
    """Name this user's other daemons, as with another $XDG_RUNTIME_DIR."""
    found = [daemon for daemon in daemons.running() if daemon.folder != folder.absolute()]
    return f", though swapd runs at {daemons.named(found)}" if found else ""


def _in_a_container(folder: Path) -> str:
    if folder.exists():
        return ""
    return (
        f". In a container, mount the daemon's folder (docker run -v FOLDER:{folder}, "
        "FOLDER as `swapd serve` printed it), and run as the daemon's user"
    )
