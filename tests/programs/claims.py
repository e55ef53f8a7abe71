"""A process that claims a runtime folder. `python claims.py CASE FOLDER` runs the function CASE."""

import socket
import sys
from pathlib import Path

from swapd.shared.runtime_dir import EVENTS, LIFELINE, RPC, RuntimeDirError, claim


def once(folder: Path) -> None:
    """Claim it, and print the reason if that is refused."""
    try:
        claim(folder).close()
    except RuntimeDirError as exc:
        print(exc)  # noqa: T201


def with_sockets(folder: Path) -> None:
    """Keep it, with a daemon's sockets in it, until a line comes on stdin."""
    claimed = claim(folder)
    for name in (EVENTS, LIFELINE, RPC):
        socket.socket(socket.AF_UNIX).bind(str(folder / name))
    print("claimed, by a process with a longer number than most", flush=True)  # noqa: T201
    sys.stdin.readline()
    claimed.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
