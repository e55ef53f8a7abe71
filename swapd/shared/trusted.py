"""Opens paths that no other user can redirect: part by part, and following no link unchecked.

A part of a path is trusted if only root, this user, or the owner of / can replace it. (The owner
of / chooses every program that runs.) Links of these users are followed here, by the same rules.
Links of others are refused, and so are folders that others may write to. In a sticky folder, such
as /tmp, only files of root or this user are trusted, and no link.

The checks apply to the opened file itself, so a rename in between changes nothing.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path, PurePath

from swapd.shared.fds import OwnedFd

#: Most links in one path, as in the kernel.
LINKS_MAX = 40

_ROOT = 0


class Untrusted(OSError):
    """Another user could replace `path`, or has."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EPERM, f"{path} {why}")
        self.path = path

    def __str__(self) -> str:
        return str(self.strerror)


def open_folder(path: Path, *, make: bool = False) -> OwnedFd:
    """Open a folder to search and to open files in (`O_PATH`). The caller checks its owner.

    `make`: make missing folders, the last one for this user alone. Raises: Untrusted, and OSError
    as opening would.
    """
    with _Walk(make=make) as walk:
        walk.follow(_ahead(path.absolute()))
        return OwnedFd(walk.at.take())


def check_folder(folder: OwnedFd, path: Path) -> None:
    """Raise Untrusted if another user can add or remove files of this folder."""
    found = os.fstat(folder.fileno())
    _check_owner(found, path)
    if found.st_mode & _OTHERS_WRITE:
        raise _writable(path, found)


def open_in(folder: OwnedFd, name: str, flags: int) -> OwnedFd:
    """Open the file of this name in a folder; refuse a link. Raises: OSError."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    return OwnedFd(os.open(name, flags, 0o600, dir_fd=folder.fileno()))


def open_named(path: Path, flags: int) -> OwnedFd:
    """Open a file by the path that a user gave for it, even in folders that others can write to.

    In such a folder, each part of the path and the file itself must belong to root or this user,
    be no link, and a file must have only one name. Raises: Untrusted, and OSError as opening would.
    """
    with _Walk(lenient=True) as walk:
        return walk.open_file(_ahead(path.absolute()), flags)


def folder_named(path: Path) -> OwnedFd:
    """The folder of such a file. Raises: as `open_named`."""
    with _Walk(lenient=True) as walk:
        walk.follow(_ahead(path.absolute().parent))
        return OwnedFd(walk.at.take())


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class _Walk:
    """A walk down from /; `at` is the current folder.

    `ahead` is always the rest of a path, the last part first.
    """

    def __init__(self, *, make: bool = False, lenient: bool = False) -> None:
        self.at = _slash()
        self._path = Path("/")
        self._links = 0
        self._make = make
        self._lenient = lenient

    def __enter__(self) -> "_Walk":
        return self

    def __exit__(self, *_: object) -> None:
        self.at.close()

    def follow(self, ahead: list[str]) -> None:
        while ahead:
            part = ahead.pop()
            shared = self._check_here()
            with self._open(part, 0o755 if ahead else 0o700) as found:
                target = self._checked(found, part, shared)
                if target is None:
                    self._move(OwnedFd(found.take()), self._path / part)
                else:
                    ahead += target

    def open_file(self, ahead: list[str], flags: int) -> OwnedFd:
        while True:
            name, folders = ahead[0], ahead[1:]
            self.follow(folders)
            shared = self._check_here()
            try:
                with open_in(self.at, name, os.O_PATH) as found:
                    target = self._checked(found, name, shared, is_file=True)
                    if target is None:
                        return OwnedFd(os.open(_reached(found), flags & ~os.O_CREAT))
                ahead = target or ["."]
            except FileNotFoundError:
                if not flags & os.O_CREAT:
                    raise
                with suppress(FileExistsError):  # another process made it: look again
                    return open_in(self.at, name, flags | os.O_EXCL)
                ahead = [name]

    def _checked(
        self, found: OwnedFd, part: str, shared: bool, *, is_file: bool = False
    ) -> list[str] | None:
        """The parts to walk instead, from here, if it is a link; else None."""
        path, what = self._path / part, os.fstat(found.fileno())
        if shared:
            _check_apart(what, path, is_file)
        if stat.S_ISLNK(what.st_mode):
            return self._target(found, what, path)
        if not (is_file or stat.S_ISDIR(what.st_mode)):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return None

    def _check_here(self) -> bool:
        """Whether others may write to this folder. Raises: Untrusted."""
        if self._path == Path("/"):
            return False  # its owner controls the system anyway
        found = os.fstat(self.at.fileno())
        _check_owner(found, self._path)
        sticky = found.st_mode & stat.S_ISVTX
        if found.st_mode & _OTHERS_WRITE and not (sticky or self._lenient):
            raise _writable(self._path, found)
        return bool(found.st_mode & _OTHERS_WRITE)

    def _open(self, part: str, mode: int) -> OwnedFd:
        try:
            return open_in(self.at, part, os.O_PATH)
        except FileNotFoundError:
            if not self._make:
                raise
        made = False
        with suppress(FileExistsError):  # another process made it: it gets the same checks
            os.mkdir(part, mode, dir_fd=self.at.fileno())
            made = True
        found = open_in(self.at, part, os.O_PATH)
        if made and not mode & 0o077:
            os.chmod(_reached(found), mode)  # the parent's default ACL may have opened it
        return found

    def _target(self, link: OwnedFd, found: os.stat_result, path: Path) -> list[str]:
        """The parts to walk instead of this link."""
        _check_owner(found, path)
        self._links += 1
        if self._links > LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = PurePath(os.readlink("", dir_fd=link.fileno()))
        if target.is_absolute():
            self._move(_slash(), Path("/"))
        return _ahead(target)

    def _move(self, to: OwnedFd, path: Path) -> None:
        self.at.close()
        self.at, self._path = to, path


def _ahead(path: PurePath) -> list[str]:
    return [part for part in reversed(path.parts) if part.strip("/")]


def _slash() -> OwnedFd:
    return OwnedFd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))


def _reached(fd: OwnedFd) -> str:
    return f"/proc/self/fd/{fd.fileno()}"


def _check_owner(found: os.stat_result, path: Path) -> None:
    if found.st_uid not in (_ROOT, os.getuid(), os.stat("/").st_uid):
        raise Untrusted(path, f"belongs to user {found.st_uid}")


def _check_apart(found: os.stat_result, path: Path, is_file: bool) -> None:
    """Check a file in a folder that others may write to."""
    if stat.S_ISLNK(found.st_mode):
        raise Untrusted(path, "is a link in a folder that other users can write to")
    if found.st_uid not in (_ROOT, os.getuid()):
        raise Untrusted(path, f"belongs to user {found.st_uid}")
    if is_file and found.st_nlink > 1:
        raise Untrusted(path, "has another name, and is in a folder that other users can write to")


def _writable(path: Path, found: os.stat_result) -> Untrusted:
    mode = stat.S_IMODE(found.st_mode)
    return Untrusted(path, f"can be written by other users (mode {mode:04o}; chmod go-w)")
