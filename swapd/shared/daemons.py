"""The daemons of this user that run on this machine, wherever their folders are.

Found by the lock that each holds on its runtime folder, as /proc shows it: no list is kept that
could be out of date. Processes that end meanwhile, and those of other users, are passed over.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from swapd.shared.runtime_dir import LIFELINE, LOCK

_PROC = Path("/proc")
#: In a line of /proc/locks, or of a descriptor's `fdinfo`: who holds the whole of a file.
_FLOCK = re.compile(r"^(?:lock:\s*)?\d+: FLOCK +ADVISORY +WRITE +(\d+) ", re.MULTILINE)
_DELETED = " (deleted)"
#: So many are named in a message.
NAMED_MAX = 3


class Found(NamedTuple):
    """A daemon that runs. `folder` is its runtime folder as the daemon sees it."""

    pid: int
    folder: Path
    #: Why no process of this mount namespace reaches the folder; "" if one does.
    unreachable: str = ""

    def __str__(self) -> str:
        why = f", {self.unreachable}" if self.unreachable else ""
        return f"{self.folder} (process {self.pid}{why})"


def running() -> list[Found]:
    """Those of this user, by their folders. Blocks for some milliseconds; raises nothing."""
    found = {}
    for pid in _lockers():
        for daemon in _served_by(pid):
            found[daemon.pid, daemon.folder] = daemon
    return sorted(found.values(), key=lambda daemon: (str(daemon.folder), daemon.pid))


def named(found: list[Found]) -> str:
    """A few of them, for a message."""
    more = f", and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return ", ".join(map(str, found[:NAMED_MAX])) + more


def _lockers() -> Iterator[int]:
    """Processes of this user that hold a lock; all of this user where the kernel lists no locks."""
    try:
        listed = (_PROC / "locks").read_text()
    except OSError:
        listed = ""
    pids = {int(pid) for pid in _FLOCK.findall(listed)}
    if not listed:
        with suppress(OSError):
            pids = {int(name) for name in os.listdir(_PROC) if name.isdigit()}
    for pid in sorted(pids):
        with suppress(OSError):
            if (_PROC / str(pid)).stat().st_uid == os.getuid():
                yield pid


def _served_by(pid: int) -> Iterator[Found]:
    """The runtime folders that this process has locked, and listens in."""
    fds = _PROC / str(pid) / "fd"
    try:
        numbers = os.listdir(fds)
    except OSError:
        return  # it has ended, or nobody may look
    for number in numbers:
        with suppress(OSError):
            target = os.readlink(fds / number)
            path = Path(target.removesuffix(_DELETED))
            if path.name == LOCK and _is_locked(pid, number):
                if target.endswith(_DELETED):
                    if _is_a_number(fds / number):
                        yield Found(pid, path.parent, "and the folder was removed")
                elif here := _seen(pid, fds / number, path):
                    yield here


def _is_locked(pid: int, number: str) -> bool:
    return bool(_FLOCK.search((_PROC / str(pid) / "fdinfo" / number).read_text()))


def _seen(pid: int, fd: Path, lock: Path) -> Found | None:
    """The daemon whose lock this is; None if it is the lock of something else."""
    root = _PROC / str(pid) / "root"
    listens = (root / lock.parent.relative_to("/") / LIFELINE).is_socket()
    if not (listens and _is_a_number(fd)):
        return None
    theirs = fd.stat()
    try:
        here = lock.stat()
    except OSError:
        here = None
    if here is None or (here.st_dev, here.st_ino) != (theirs.st_dev, theirs.st_ino):
        return Found(pid, lock.parent, "in another mount namespace, as a container has")
    return Found(pid, lock.parent)


def _is_a_number(fd: Path) -> bool:
    """Whether a lock has what a daemon writes into its own. Opened anew, so no offset moves."""
    with fd.open("rb") as file:
        return file.read(32).strip().isdigit()
