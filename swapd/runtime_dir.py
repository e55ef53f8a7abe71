"""The runtime folder: its mode, its lock, and the names of the sockets in it.

Shared by daemon and client, so that both spell the names alike.
"""

import fcntl
import os
import stat
from pathlib import Path

from swapd.fds import OwnedFd

LIFELINE, RPC, EVENTS, LOCK = "lifeline.sock", "rpc.sock", "events.sock", "lock"

#: sun_path holds 108 bytes with the final zero.
SOCKET_PATH_MAX = 107


class RuntimeDirError(Exception):
    """The folder cannot be used. The message says why, and what to do."""


def claim(folder: Path) -> OwnedFd:
    """Create the folder, 0700, and lock it; remove sockets a dead daemon left.

    Hold the returned descriptor: closing it gives the lock back. Raises: RuntimeDirError.
    """
    longest = max(len(os.fsencode(folder / name)) for name in (LIFELINE, RPC, EVENTS))
    if longest > SOCKET_PATH_MAX:
        raise RuntimeDirError(
            f"{folder}: socket paths in it are {longest} bytes long, the system takes "
            f"{SOCKET_PATH_MAX}; choose a shorter --runtime-dir"
        )
    _make_private(folder)
    lock = _open_lock(folder)
    try:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        pid = holder(folder) or "unknown"
        raise RuntimeDirError(
            f"{folder}: another swapd (process {pid}) serves this device; "
            "stop it, or use another --device or --runtime-dir"
        ) from None
    os.ftruncate(lock.fileno(), 0)
    os.pwrite(lock.fileno(), f"{os.getpid()}\n".encode(), 0)
    remove_sockets(folder)
    return lock


def holder(folder: Path) -> int | None:
    """The process that claimed the folder last, as it calls itself; None if nobody did."""
    try:
        return int((folder / LOCK).read_text())
    except (OSError, ValueError):
        return None


def remove_sockets(folder: Path) -> None:
    for name in (LIFELINE, RPC, EVENTS):
        (folder / name).unlink(missing_ok=True)


def _open_lock(folder: Path) -> OwnedFd:
    try:
        return OwnedFd(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as exc:
        raise RuntimeDirError(
            f"{folder / LOCK}: {exc.strerror}; choose another --runtime-dir"
        ) from exc


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as exc:
        raise RuntimeDirError(f"{folder}: {exc.strerror}; choose another --runtime-dir") from exc
    if found.st_uid != os.getuid():
        raise RuntimeDirError(
            f"{folder} belongs to user {found.st_uid}; choose another --runtime-dir"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
