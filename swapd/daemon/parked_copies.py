"""Host copies without a daemon: each is a memfd with its bytes and a sealed memfd with its
manifest.

The next daemon gets a set of descriptors (`parking.py`); `sort` finds which belong together.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import msgspec

from swapd.daemon.host_copies import NAME
from swapd.shared.fds import OwnedFd

#: Name of the manifests' memfds. Change the number when manifests change meaning.
MANIFEST = "swapd-kept-1"
_MANIFEST_MAX_BYTES = 1 << 16
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Manifest(msgspec.Struct, frozen=True):
    """Describes a parked host copy. `content`: hash of the files, or the key that a worker vouched
    for; `inode` identifies the memfd with the bytes; `since`: when it was parked."""

    name: str
    part_of: str
    content: str
    layout: str
    nbytes: int
    inode: tuple[int, int]
    since: float

    def write(self) -> OwnedFd:
        """Raises: OSError."""
        fd = OwnedFd(os.memfd_create(MANIFEST, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            os.write(fd.fileno(), msgspec.msgpack.encode(self))
            fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            fd.close()
            raise
        return fd


class ParkedHostCopy(NamedTuple):
    """`manifest` is None if there is none for the host copy."""

    fd: OwnedFd
    manifest: Manifest | None


def inode(fd: OwnedFd | int) -> tuple[int, int]:
    """Identify a sealed memfd, with its time because inode numbers are reused."""
    found = os.fstat(fd if isinstance(fd, int) else fd.fileno())
    return found.st_ino, found.st_mtime_ns


def inherited() -> Iterator[OwnedFd]:
    """Yield the memfds of swapd that this program was started with, by systemd or by the previous
    program of this process. The caller owns them."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the listing's own descriptor is closed
            if os.get_inheritable(fd) and _name(fd) in (NAME, MANIFEST):
                os.set_inheritable(fd, False)
                yield OwnedFd(fd)


def sort(found: Iterable[OwnedFd]) -> list[ParkedHostCopy]:
    """Return the host copies, the last parked first. Closes all other descriptors."""
    copies: dict[tuple[int, int], OwnedFd] = {}
    manifests: dict[tuple[int, int], Manifest] = {}
    for fd in found:
        if _name(fd.fileno()) == NAME and inode(fd) not in copies:
            copies[inode(fd)] = fd
            continue
        with fd, suppress(OSError, msgspec.MsgspecError):
            manifest = _read(fd)
            manifests[manifest.inode] = manifest
    parked = [ParkedHostCopy(fd, manifests.get(at)) for at, fd in copies.items()]
    return sorted(parked, key=lambda one: -one.manifest.since if one.manifest else 0.0)


def _read(fd: OwnedFd) -> Manifest:
    """Raises: OSError; MsgspecError if it is not a complete manifest."""
    if _name(fd.fileno()) != MANIFEST or fcntl.fcntl(fd.fileno(), fcntl.F_GET_SEALS) != _SEALS:
        raise msgspec.DecodeError("no manifest")
    data = os.pread(fd.fileno(), _MANIFEST_MAX_BYTES, 0)
    return msgspec.msgpack.decode(data, type=Manifest)


def _name(fd: int) -> str:
    """Return the name of a memfd, "" for other files. Raises: OSError."""
    path = os.readlink(f"/proc/self/fd/{fd}")
    return path.removeprefix("/memfd:").removesuffix(" (deleted)") if path[:7] == "/memfd:" else ""
