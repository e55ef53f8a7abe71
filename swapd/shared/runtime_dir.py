"""The runtime folder of a daemon: opening it, its lock, and the names of its files.

Daemon and client open the folder once, check each part of its path, and reach its files by that
descriptor. So no other user can replace the folder, and no path is too long for a socket.

A part of the path is trusted if only root, this user, or the owner of / can replace it. (The owner
of / chooses every program that runs.) Links of these users are followed, by the same rules. Links
of others are refused, and so are folders that others may write to. In a sticky folder, such as
/tmp, only files of root or this user are trusted, and no link. The checks apply to the opened file
itself, so a rename in between changes nothing.
"""

import errno
import fcntl
import os
import stat
from contextlib import ExitStack, suppress
from pathlib import Path, PurePath
from typing import NamedTuple

from swapd.shared.errors import UserError
from swapd.shared.fds import OwnedFd

LIFELINE, RPC, EVENTS, LOCK = "lifeline.sock", "rpc.sock", "events.sock", "lock"
#: The process that holds host copies while no daemon runs.
KEEPER = "keeper.sock"
SWAP_LOG = "swap-log.jsonl"
#: Files of a daemon that a client started: a lock while it starts and runs; its messages for
#: people.
STARTING, DAEMON_LOG = "starting", "daemon.log"
NAMES = {LIFELINE, RPC, EVENTS, LOCK, KEEPER, SWAP_LOG, f"{SWAP_LOG}.1", STARTING, DAEMON_LOG}

#: Longer than the process id in a lock.
_LOCK_MAX_BYTES = 32
ELSEWHERE = "choose another --runtime-dir (or $XDG_RUNTIME_DIR)"
#: Part of the error of a daemon that finds the folder claimed.
ANOTHER = "another swapd"


class Problem(NamedTuple):
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}; {self.advice}"


class RuntimeDirError(UserError):
    """The message gives the reason and advice."""


class Folder:
    """An open runtime folder. `path` is its name for people, and is not used to reach it."""

    def __init__(self, path: Path, fd: OwnedFd) -> None:
        self.path = path
        self._fd = fd
        self._lock: OwnedFd | None = None
        #: Set by `lock`: a daemon before did not stop in order, so workers may still use its
        #: memory.
        self.follows = False

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def inside(self) -> Path:
        """A path to its files, for sockets: valid in this process while the folder is open."""
        return Path(f"/proc/self/fd/{self._fd.fileno()}")

    def again(self) -> "Folder":
        """Return the same folder with its own descriptor. Raises: OSError."""
        return Folder(self.path, self.descriptor())

    def open(self, name: str, flags: int) -> OwnedFd:
        """Open a file, but no link. A new file is for this user alone. Raises: OSError."""
        return open_in(self._fd, name, flags)

    def descriptor(self) -> OwnedFd:
        """The caller owns the descriptor. Raises: OSError."""
        return OwnedFd(os.dup(self._fd.fileno()))

    def stat(self) -> os.stat_result:
        return os.fstat(self._fd.fileno())

    def holder(self) -> int | None:
        """Return the process id that the last daemon wrote into the lock; None if there is none."""
        try:
            with self.open(LOCK, os.O_RDONLY | os.O_NONBLOCK) as lock:
                return int(os.read(lock.fileno(), _LOCK_MAX_BYTES))
        except (OSError, ValueError):
            return None

    def remove_sockets(self) -> bool:
        """Return whether there were any."""
        found = False
        for name in (LIFELINE, RPC, EVENTS):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd.fileno())
                found = True
        return found

    def lock(self) -> None:
        """Lock the folder until `close`, and remove sockets that a dead daemon left. Raises:
        OSError; RuntimeDirError if another daemon holds the lock."""
        lock = _open_lock(self)
        try:
            if (left := _left_locked(lock)) is not None:
                lock.close()
                lock = left
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(lock.fileno(), 0)
            os.pwrite(lock.fileno(), f"{os.getpid()}\n".encode(), 0)
            self.follows = self.remove_sockets() or lock is left
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

    def leave_locked(self) -> None:
        """Let the program that replaces this one by exec take over the lock, in its `lock`."""
        assert self._lock is not None
        os.set_inheritable(self._lock.fileno(), True)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._fd.close()


def find(path: Path) -> Folder:
    """Open the folder of a daemon, for a client. Raises: Untrusted if another user could be behind
    it; OSError if it does not exist."""
    with ExitStack() as undo:
        folder = undo.enter_context(Folder(path, open_folder(path)))
        check_folder(folder._fd, path)
        undo.pop_all()
        return folder


def claim(path: Path) -> Folder:
    """Make the folder with mode 0700, and lock it as `Folder.lock` does.

    An existing folder is not changed. It must be private to this user, and empty or swapd's.
    Raises: RuntimeDirError.
    """
    try:
        with ExitStack() as undo:
            folder = undo.enter_context(Folder(path, open_folder(path, make=True)))
            if problem := problem_with(folder):
                raise RuntimeDirError(str(problem))
            folder.lock()
            undo.pop_all()
            return folder
    except OSError as exc:
        raise RuntimeDirError(str(refused(path, exc))) from exc


def problem_with(folder: Folder) -> Problem | None:
    """Return why no daemon of this user may claim the folder. Raises: OSError."""
    path, found = folder.path, folder.stat()
    if found.st_uid != os.getuid():
        return Problem(f"{path} belongs to user {found.st_uid}", ELSEWHERE)
    mode = stat.S_IMODE(found.st_mode)
    new_one = f"{ELSEWHERE}, such as {path / 'swapd'}, which is made if it is missing"
    with folder.open(".", os.O_RDONLY | os.O_DIRECTORY) as listing:
        strange = sorted(set(os.listdir(listing.fileno())) - NAMES)
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
    if isinstance(exc, Untrusted):
        return Problem(str(exc) if exc.path == path else f"{path}: {exc}", ELSEWHERE)
    return Problem(f"{path}: {exc.strerror or exc}", ELSEWHERE)


def _is_swapd_s(folder: Folder) -> bool:
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


def _left_locked(lock: OwnedFd) -> OwnedFd | None:
    """Return the descriptor that `leave_locked` left to this program, if any."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # such as the listing's own descriptor, now closed
            if os.path.sameopenfile(fd, lock.fileno()) and os.get_inheritable(fd):
                os.set_inheritable(fd, False)
                return OwnedFd(fd)
    return None


def _is_ours(file: OwnedFd) -> bool:
    """Return whether it is a regular file of this user with only one name."""
    found = os.fstat(file.fileno())
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and found.st_nlink == 1


#: Most links in one path, as in the kernel.
LINKS_MAX = 40


class Untrusted(OSError):
    """Another user could replace `path`, or has."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, f"{path} {why}")
        self.path = path

    def __str__(self) -> str:
        return str(self.strerror)


def open_folder(path: Path, *, make: bool = False) -> OwnedFd:
    """Open a folder to search and to open files in (`O_PATH`). The caller checks its owner.

    `make`: make missing folders, the last one for this user alone. Raises: Untrusted; OSError.
    """
    return _walked(path.absolute(), make=make, lenient=False)


def check_folder(
    folder: OwnedFd, path: Path, *, passed: bool = False, lenient: bool = False
) -> bool:
    """Raise Untrusted if another user can add or remove files of this folder.

    If it is only `passed` on the way to another, others may, as long as they cannot replace that
    one: in a sticky folder, or if `lenient` in any. Returns whether others may.
    """
    if passed and path == Path("/"):
        return False  # its owner controls the system anyway
    found = os.fstat(folder.fileno())
    _check_owner(found, path)
    shared = bool(found.st_mode & _OTHERS_WRITE)
    if shared and not (passed and (lenient or found.st_mode & stat.S_ISVTX)):
        mode = stat.S_IMODE(found.st_mode)
        raise Untrusted(path, f"can be written by other users (mode {mode:04o}; chmod go-w)")
    return shared


def open_in(folder: OwnedFd, name: str, flags: int) -> OwnedFd:
    """Open a file; refuse a link. Raises: OSError."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    return OwnedFd(os.open(name, flags, 0o600, dir_fd=folder.fileno()))


def open_named(path: Path, flags: int, *, links: int = 0) -> OwnedFd:
    """Open a file by the path that a user gave for it, even in folders that others can write to.

    In such a folder, each part of the path and the file itself must belong to root or this user and
    be no link, and a file must have only one name. `links`: number followed so far. Raises:
    Untrusted; OSError.
    """
    path = path.absolute()
    name = path.name or "."
    with folder_named(path) as folder:
        try:
            found = open_in(folder, name, os.O_PATH)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            return open_in(folder, name, flags | os.O_EXCL)
        with found:
            what = os.fstat(found.fileno())
            if os.fstat(folder.fileno()).st_mode & _OTHERS_WRITE:
                _check_apart(what, path, is_file=True)
            if stat.S_ISLNK(what.st_mode):
                target = _target(found, what, path, links + 1)
                return open_named(path.parent / target, flags, links=links + 1)
            return OwnedFd(os.open(_reached(found), flags & ~os.O_CREAT))


def folder_named(path: Path) -> OwnedFd:
    """Return the folder of such a file. Raises: as `open_named`."""
    return _walked(path.absolute().parent, make=False, lenient=True)


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def _walked(path: Path, *, make: bool, lenient: bool) -> OwnedFd:
    """Walk down from /. `lenient`: also through folders that others may write to."""
    at, here, links = _slash(), Path("/"), 0
    ahead = _ahead(path)  # in reverse
    try:
        while ahead:
            part = ahead.pop()
            shared = check_folder(at, here, passed=True, lenient=lenient)
            with _entered(at, part, make=make, mode=0o755 if ahead else 0o700) as found:
                what = os.fstat(found.fileno())
                if shared:
                    _check_apart(what, here / part)
                if stat.S_ISLNK(what.st_mode):
                    links += 1
                    target = _target(found, what, here / part, links)
                    ahead += _ahead(target)
                    if target.is_absolute():
                        at.close()
                        at, here = _slash(), Path("/")
                elif stat.S_ISDIR(what.st_mode):
                    at.close()
                    at, here = OwnedFd(found.take()), here / part
                else:
                    raise _error(errno.ENOTDIR, here / part)
        return OwnedFd(at.take())
    finally:
        at.close()


def _entered(folder: OwnedFd, part: str, *, make: bool, mode: int) -> OwnedFd:
    try:
        return open_in(folder, part, os.O_PATH)
    except FileNotFoundError:
        if not make:
            raise
    made = False
    with suppress(FileExistsError):  # made by another process: checked like any folder
        os.mkdir(part, mode, dir_fd=folder.fileno())
        made = True
    found = open_in(folder, part, os.O_PATH)
    if made and not mode & 0o077:
        os.chmod(_reached(found), mode)  # the parent's default ACL may have opened it
    return found


def _target(link: OwnedFd, found: os.stat_result, path: Path, links: int) -> PurePath:
    _check_owner(found, path)
    if links > LINKS_MAX:
        raise _error(errno.ELOOP, path)
    return PurePath(os.readlink("", dir_fd=link.fileno()))


def _ahead(path: PurePath) -> list[str]:
    return [part for part in reversed(path.parts) if part.strip("/")]


def _slash() -> OwnedFd:
    return OwnedFd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))


def _reached(fd: OwnedFd) -> str:
    return f"/proc/self/fd/{fd.fileno()}"


def _check_owner(found: os.stat_result, path: Path) -> None:
    if found.st_uid not in (0, os.getuid(), os.stat("/").st_uid):
        raise Untrusted(path, f"belongs to user {found.st_uid}")


def _check_apart(found: os.stat_result, path: Path, *, is_file: bool = False) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise Untrusted(path, "is a link in a folder that other users can write to")
    if found.st_uid not in (0, os.getuid()):
        raise Untrusted(path, f"belongs to user {found.st_uid}")
    if is_file and found.st_nlink > 1:
        raise Untrusted(path, "has another name, and is in a folder that other users can write to")


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
