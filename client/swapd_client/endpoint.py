"""Where the daemon is, and the first connection to it."""

import os
import re
import socket
import struct
import sys
from pathlib import Path

from swapd import config
from swapd_client.errors import NotRunning


def resolve(endpoint: str | os.PathLike[str] | None, device: str | None) -> Path:
    """The runtime folder to connect to: as given, `$SWAPD_ENDPOINT`, or the device's."""
    if endpoint is not None:
        return Path(endpoint)
    if named := config.endpoint_from_environment():
        return Path(named)
    return config.default_folder(device or "host")


def default_label() -> str:
    """What the log calls this process unless it says otherwise."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return f"{program}:{os.getpid()}"


def open_lifeline(path: Path) -> tuple[socket.socket, int]:
    """A lifeline to the daemon, and the daemon's process id."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(str(path))
    except PermissionError as exc:
        sock.close()
        raise NotRunning(
            f"{path.parent} belongs to another user, whose swapd serves nobody else "
            f"({exc.strerror}); start one as this user"
        ) from exc
    except OSError as exc:
        sock.close()
        raise NotRunning(
            f"no swapd at {path.parent} ({exc.strerror or exc}). Start one: {_command(path.parent)}"
            f"; or say where it is: connect(path) or ${config.ENDPOINT_VARIABLE}"
            f"{_in_a_container(path.parent)}"
        ) from exc
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        sock.close()
        raise NotRunning(
            f"what listens at {path.parent} runs as user {uid}, not as this one: it gets no "
            "weights. Start a swapd as this user, or connect(path) to the right folder"
        )
    return sock, pid


def _command(folder: Path) -> str:
    """What starts the daemon that belongs there, as far as its name tells."""
    numbered = re.fullmatch(r"(?:cuda|gpu)(\d+)", folder.name)
    device, budget = (f"cuda:{numbered[1]}", "40GiB") if numbered else ("host", "1GiB")
    where = "" if folder == config.default_folder(device) else f" --runtime-dir {folder}"
    return f"swapd serve --device {device} --budget {budget}{where}"


def _in_a_container(folder: Path) -> str:
    """What else to do where not even the folder is there."""
    if folder.exists():
        return ""
    return (
        f". In a container the daemon's folder has to be mounted (docker run -v FOLDER:{folder}, "
        "FOLDER as `swapd serve` said it), and the user has to be the daemon's"
    )
