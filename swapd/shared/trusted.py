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
    return _walked(path.absolute(), make=make, lenient=False)


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


def open_named(path: Path, flags: int, *, links: int = 0) -> OwnedFd:
    """Open a file by the path that a user gave for it, even in folders that others can write to.

    In such a folder, each part of the path and the file itself must belong to root or this user,
    be no link, and a file must have only one name. `links`: those followed so far. Raises:
    Untrusted, and OSError as opening would.
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
    """The folder of such a file. Raises: as `open_named`."""
    return _walked(path.absolute().parent, make=False, lenient=True)


_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def _walked(path: Path, *, make: bool, lenient: bool) -> OwnedFd:
    """Walk down from /; `lenient`: also through folders that others may write to, past their own
    files."""
    at, here, links = _slash(), Path("/"), 0
    ahead = _ahead(path)  # the last part first
    try:
        while ahead:
            part = ahead.pop()
            shared = _check_passed(at, here, lenient=lenient)
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


def _check_passed(folder: OwnedFd, path: Path, *, lenient: bool) -> bool:
    """Whether others may write to a folder on the way. Raises: Untrusted."""
    if path == Path("/"):
        return False  # its owner controls the system anyway
    found = os.fstat(folder.fileno())
    _check_owner(found, path)
    if found.st_mode & _OTHERS_WRITE and not (found.st_mode & stat.S_ISVTX or lenient):
        raise _writable(path, found)
    return bool(found.st_mode & _OTHERS_WRITE)


def _entered(folder: OwnedFd, part: str, *, make: bool, mode: int) -> OwnedFd:
    """A part of the path, opened; made with this mode if it is missing."""
    try:
        return open_in(folder, part, os.O_PATH)
    except FileNotFoundError:
        if not make:
            raise
    made = False
    with suppress(FileExistsError):  # another process made it: it gets the same checks
        os.mkdir(part, mode, dir_fd=folder.fileno())
        made = True
    found = open_in(folder, part, os.O_PATH)
    if made and not mode & 0o077:
        os.chmod(_reached(found), mode)  # the parent's default ACL may have opened it
    return found


def _target(link: OwnedFd, found: os.stat_result, path: Path, links: int) -> PurePath:
    """The path to walk instead of this link."""
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
    if found.st_uid not in (_ROOT, os.getuid(), os.stat("/").st_uid):
        raise Untrusted(path, f"belongs to user {found.st_uid}")


def _check_apart(found: os.stat_result, path: Path, *, is_file: bool = False) -> None:
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


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
