"""A process that only holds descriptors, so that they outlive the daemon. Imports nothing of swapd.

Runs as `python -I -S keeper.py NAME INODE` with the socket of that name as stdin. A daemon that
connects gets all that the keeper holds, then READY=1. It sends the messages of systemd's descriptor
store.
"""

import os
import socket
import struct
import sys
import time
from contextlib import suppress

#: How long it waits for the next daemon.
WAIT_S = 600.0
#: Interval for checking that its socket can be found.
_LOOK_S = 5.0
_MAX_BYTES = 4096
_FDS_MAX = 2
_CREDENTIALS = (socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))

#: Descriptors by the `FDNAME=` line of their message.
Held = dict[bytes, list[int]]


def main(name: str, inode: int) -> None:
    """Serve one daemon after another, until one leaves nothing or none comes."""
    door, held = socket.socket(fileno=0), Held()
    while (daemon := _next_daemon(door, name, inode)) is not None:
        with daemon, suppress(OSError):
            if struct.unpack("3i", daemon.getsockopt(*_CREDENTIALS))[1] == os.getuid():
                _serve(daemon, held)
        if not held:
            return _send_away(door)


def _next_daemon(door: socket.socket, name: str, inode: int) -> socket.socket | None:
    """Return None after WAIT_S, or if another socket has the name."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until and _is_there(name, inode):
        door.settimeout(_LOOK_S)
        with suppress(TimeoutError):
            return door.accept()[0]
    return None


def _send_away(door: socket.socket) -> None:
    """Say to each daemon that has connected that nothing is held. No other can connect."""
    door.shutdown(socket.SHUT_RD)
    door.setblocking(False)
    with suppress(OSError):  # BlockingIOError: there are no more
        while True:
            daemon = door.accept()[0]
            with daemon, suppress(OSError):
                daemon.send(b"READY=1")


def _is_there(name: str, inode: int) -> bool:
    try:
        return os.stat(name).st_ino == inode
    except FileNotFoundError:
        return False


def _serve(daemon: socket.socket, held: Held) -> None:
    """Raises: OSError."""
    with suppress(OSError):  # if it has died, what it sent before still counts
        for name, fds in held.items():
            socket.send_fds(daemon, [b"FDSTORE=1\n" + name], fds)
        daemon.send(b"READY=1")
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(daemon, _MAX_BYTES, _FDS_MAX)
        except ConnectionResetError:  # comes before the rest if it died without reading all
            continue
        if not message:
            return
        what, _, name = message.partition(b"\n")
        if what in (b"FDSTORE=1", b"FDSTOREREMOVE=1"):
            _close(held.pop(name, []))
        if what == b"FDSTORE=1" and len(fds) == _FDS_MAX:
            held[name] = fds
        else:
            _close(fds)  # for BARRIER=1, closing is the answer


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
