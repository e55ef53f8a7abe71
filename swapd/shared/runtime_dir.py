"""The runtime folder: opening it, its lock, and the names of the files in it.

Daemon and client share this module, so both use the same names and the same checks. They open the
folder once, and check each part of its path (`trusted.py`). Then they reach all files in it by
that descriptor, so no other user can replace the folder, and no path is too long for a socket.
"""

import fcntl
import os
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from swapd.shared import trusted
from swapd.shared.fds import OwnedFd

LIFELINE, RPC, EVENTS, LOCK = "lifeline.sock", "rpc.sock", "events.sock", "lock"
SWAP_LOG = "swap-log.jsonl"
#: For a daemon that a client started: a lock while it starts and runs; its messages for people.
STARTING, DAEMON_LOG = "starting", "daemon.log"
#: All files of a daemon in the folder.
NAMES = frozenset((LIFELINE, RPC, EVENTS, LOCK, SWAP_LOG, f"{SWAP_LOG}.1", STARTING, DAEMON_LOG))

#: Longer than the process id in a lock.
_LOCK_MAX_BYTES = 32
ELSEWHERE = "choose another --runtime-dir"
#: Part of the error of a daemon that finds the folder claimed.
ANOTHER = "another swapd"


class Problem(NamedTuple):
    """A reason why a daemon cannot use a folder, and advice."""

    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}; {self.advice}"


class RuntimeDirError(Exception):
    """The folder cannot be used. The message gives the reason and advice."""


class Folder:
    """An open runtime folder. `path` is its name for people, and is not used again."""

    def __init__(self, path: Path, fd: OwnedFd) -> None:
        self.path = path
        self._fd = fd
        #: Of a folder that only this daemon serves, until it is closed.
        self._lock: OwnedFd | None = None

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def inside(self) -> Path:
        """A path to the files in it, for sockets: valid while it is open, in this process."""
        return Path(f"/proc/self/fd/{self._fd.fileno()}")

    def again(self) -> "Folder":
        """The same folder, with its own descriptor. Raises: OSError."""
        return Folder(self.path, self.descriptor())

    def open(self, name: str, flags: int) -> OwnedFd:
        """Open a file in it, no link; a new file is for this user alone. Raises: OSError."""
        return trusted.open_in(self._fd, name, flags)

    def descriptor(self) -> OwnedFd:
        """A new descriptor of the folder, which the caller owns. Raises: OSError."""
        return OwnedFd(os.dup(self._fd.fileno()))

    def stat(self) -> os.stat_result:
        return os.fstat(self._fd.fileno())

    def names(self) -> set[str]:
        """The names of the files in it. Raises: OSError."""
        with trusted.open_in(self._fd, ".", os.O_RDONLY | os.O_DIRECTORY) as listing:
            return set(os.listdir(listing.fileno()))

    def holder(self) -> int | None:
        """The id of the last process that claimed it, as it wrote it; None if there is none."""
        try:
            with self.open(LOCK, os.O_RDONLY | os.O_NONBLOCK) as lock:
                return int(os.read(lock.fileno(), _LOCK_MAX_BYTES))
        except (OSError, ValueError):
            return None

    def remove_sockets(self) -> None:
        for name in (LIFELINE, RPC, EVENTS):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd.fileno())

    def check(self) -> None:
        """Raise Untrusted if another user can add or remove files in it."""
        trusted.check_folder(self._fd, self.path)

    def lock(self) -> None:
        """Lock it until it is closed; remove sockets that a dead daemon left. Raises: OSError;
        RuntimeDirError if another daemon has it."""
        lock = _open_lock(self)
        try:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock.fileno(), 0)
            os.pwrite(lock.fileno(), f"{os.getpid()}\n".encode(), 0)
            self.remove_sockets()
        except BlockingIOError:
            lock.close()
            pid = self.holder() or "unknown"
            raise RuntimeDirError(
                f"{self.path}: {ANOTHER} (process {pid}) serves this device; "
                "stop it, or use another --device or --runtime-dir"
            ) from None
        except BaseException:
            lock.close()
            raise
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._fd.close()


def find(path: Path) -> Folder:
    """Open the folder of a daemon, for a client.

    Raises: trusted.Untrusted if another user could be behind it; OSError if it does not exist.
    """
    with ExitStack() as undo:
        folder = undo.enter_context(Folder(path, trusted.open_folder(path)))
        folder.check()
        undo.pop_all()
        return folder


def claim(path: Path) -> Folder:
    """Make the folder, mode 0700, and lock it until it is closed; remove sockets that a dead daemon
    left.

    An existing folder is not changed. It must be private to this user, and empty or swapd's.
    Raises: RuntimeDirError.
    """
    try:
        with ExitStack() as undo:
            folder = undo.enter_context(Folder(path, trusted.open_folder(path, make=True)))
            if problem := problem_with(folder):
                raise RuntimeDirError(str(problem))
            folder.lock()
            undo.pop_all()
            return folder
    except OSError as exc:
        raise RuntimeDirError(str(refused(path, exc))) from exc


def problem_with(folder: Folder) -> Problem | None:
    """The reason why no daemon of this user may claim it; None if one may. Raises: OSError."""
    path, found = folder.path, folder.stat()
    if found.st_uid != os.getuid():
        return Problem(f"{path} belongs to user {found.st_uid}", ELSEWHERE)
    mode = stat.S_IMODE(found.st_mode)
    new_one = f"{ELSEWHERE}, such as {path / 'swapd'}, which is made if it is missing"
    strange = sorted(folder.names() - NAMES)
    if strange and not _is_swapd_s(folder):
        return Problem(f"{path} is not empty and not swapd's: {strange[0]!r} is in it", new_one)
    if mode & 0o077:
        private = "" if mode & stat.S_ISVTX else f"make it private (chmod 700 {path}), or "
        return Problem(
            f"{path} is open to other users (mode {mode:04o}), and swapd changes no folder that "
            "was there before",
            f"{private}{new_one}",
        )
    return None


def refused(path: Path, exc: OSError) -> Problem:
    """The problem for a daemon that `exc`, raised on the way to the folder, means."""
    if isinstance(exc, trusted.Untrusted):
        return Problem(str(exc) if exc.path == path else f"{path}: {exc}", ELSEWHERE)
    return Problem(f"{path}: {exc.strerror or exc}", ELSEWHERE)


def _is_swapd_s(folder: Folder) -> bool:
    """Whether a daemon of this user used it before: then it left a lock with its process id."""
    try:
        with folder.open(LOCK, os.O_RDONLY | os.O_NONBLOCK) as lock:
            return _is_ours(lock) and os.read(lock.fileno(), _LOCK_MAX_BYTES).strip().isdigit()
    except OSError:
        return False


def _open_lock(folder: Folder) -> OwnedFd:
    try:
        lock = folder.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
    except OSError as exc:
        raise RuntimeDirError(f"{folder.path / LOCK}: {exc.strerror}; {ELSEWHERE}") from exc
    if not _is_ours(lock):
        lock.close()
        raise RuntimeDirError(f"{folder.path / LOCK} is not a file of swapd's; {ELSEWHERE}")
    return lock


def _is_ours(file: OwnedFd) -> bool:
    """Whether it is a regular file of this user with only one name."""
    found = os.fstat(file.fileno())
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and found.st_nlink == 1
