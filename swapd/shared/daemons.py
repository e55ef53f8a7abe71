"""The running daemons of this user on this machine, with any runtime folder.

Each daemon holds a lock on its runtime folder, and /proc shows the locks: there is no list that
could be out of date. Skips processes that end meanwhile, and those of other users.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from swapd.shared.runtime_dir import LIFELINE, LOCK

_PROC = Path("/proc")
#: Matches a line of /proc/locks, or of a descriptor's `fdinfo`: the holder of a whole file's lock.
_FLOCK = re.compile(r"^(?:lock:\s*)?\d+: FLOCK +ADVISORY +WRITE +(\d+) ", re.MULTILINE)
_DELETED = " (deleted)"
#: A message names at most so many.
NAMED_MAX = 3


class RunningDaemon(NamedTuple):
    """A running daemon. `folder` is its runtime folder as the daemon sees it."""

    pid: int
    folder: Path
    #: The reason why no process of this mount namespace reaches the folder; "" if one does.
    unreachable: str = ""

    def __str__(self) -> str:
        why = f", {self.unreachable}" if self.unreachable else ""
        return f"{self.folder} (process {self.pid}{why})"


def running() -> list[RunningDaemon]:
    """The daemons of this user, by their folders. Blocks for some milliseconds; raises nothing."""
    found = {}
    for pid in _lockers():
        for daemon in _served_by(pid):
            found[daemon.pid, daemon.folder] = daemon
    return sorted(found.values(), key=lambda daemon: (str(daemon.folder), daemon.pid))


def named(found: list[RunningDaemon]) -> str:
    """The first few of them, for a message."""
    more = f", and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return ", ".join(map(str, found[:NAMED_MAX])) + more


def _lockers() -> Iterator[int]:
    """Processes of this user that hold a lock; all of them if the kernel lists no locks."""
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


def _served_by(pid: int) -> Iterator[RunningDaemon]:
    """The runtime folders that this process has locked and listens in."""
    fds = _PROC / str(pid) / "fd"
    try:
        numbers = os.listdir(fds)
    except OSError:
        return  # it has ended, or this process may not look
    for number in numbers:
        with suppress(OSError):
            target = os.readlink(fds / number)
            path = Path(target.removesuffix(_DELETED))
            if path.name == LOCK and _is_locked(pid, number):
                if target.endswith(_DELETED):
                    if _is_a_number(fds / number):
                        yield RunningDaemon(pid, path.parent, "and the folder was removed")
                elif here := _seen(pid, fds / number, path):
                    yield here


def _is_locked(pid: int, number: str) -> bool:
    return bool(_FLOCK.search((_PROC / str(pid) / "fdinfo" / number).read_text()))


def _seen(pid: int, fd: Path, lock: Path) -> RunningDaemon | None:
    """The daemon of this lock; None if another program holds it."""
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
        return RunningDaemon(pid, lock.parent, "in another mount namespace, as a container has")
    return RunningDaemon(pid, lock.parent)


def _is_a_number(fd: Path) -> bool:
    """Whether a lock has a process id in it, as a daemon's has. Opened anew: no offset moves."""
    with fd.open("rb") as file:
        return file.read(32).strip().isdigit()
