"""The running daemons of this user, with any runtime folder.

Each daemon holds a lock on its runtime folder, and /proc shows the locks: no list can be out of
date. Processes that end meanwhile and those of other users are skipped.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from swapd.shared import config
from swapd.shared.errors import UserError
from swapd.shared.runtime_dir import LIFELINE, LOCK

_PROC = Path("/proc")
#: Matches a line of /proc/locks or of `fdinfo`: the holder of a lock on a whole file.
_FLOCK = re.compile(r"^(?:lock:\s*)?\d+: FLOCK +ADVISORY +WRITE +(\d+) ", re.MULTILINE)
_DELETED = " (deleted)"
NAMED_MAX = 3


class RunningDaemon(NamedTuple):
    """`folder` is the runtime folder as the daemon sees it."""

    pid: int
    folder: Path
    #: Why no process of this mount namespace reaches the folder; "" if one does.
    unreachable: str = ""

    def __str__(self) -> str:
        why = f", {self.unreachable}" if self.unreachable else ""
        return f"{self.folder} (process {self.pid}{why})"


def running() -> list[RunningDaemon]:
    """Return the daemons of this user, by folder. Blocks for some milliseconds; raises nothing."""
    holders: list[str] = []
    with suppress(OSError):
        holders = _FLOCK.findall((_PROC / "locks").read_text())
    if not holders:  # some kernels do not list locks
        holders = [name for name in os.listdir(_PROC) if name.isdigit()]
    found = {daemon for pid in holders for daemon in _served_by(_PROC / pid)}
    return sorted(found, key=lambda daemon: (str(daemon.folder), daemon.pid))


class SeveralDaemons(UserError):
    """The message names the daemons."""


def usual_folder() -> Path:
    """Return the runtime folder of the only daemon in a default folder, else of this user's only
    daemon, else the default of `swapd serve`. Blocks as `running`. Raises: SeveralDaemons."""
    found = [daemon for daemon in running() if not daemon.unreachable]
    usual = config.usual_folder()
    beside = [daemon for daemon in found if daemon.folder.parent == usual.parent.resolve()]
    return only(beside or found) or usual


def only(found: list[RunningDaemon]) -> Path | None:
    """Raises: SeveralDaemons."""
    if len(found) > 1:
        raise SeveralDaemons(
            f"{len(found)} daemons of this user run: {named(found)}. Choose one: --endpoint "
            f"{found[0].folder}, --device or ${config.ENDPOINT_VARIABLE}, and in Python "
            "connect(FOLDER) or connect(DEVICE); `swapd ps` lists them"
        )
    return found[0].folder if found else None


def named(found: list[RunningDaemon]) -> str:
    more = f", and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
    return ", ".join(map(str, found[:NAMED_MAX])) + more


def _served_by(process: Path) -> Iterator[RunningDaemon]:
    try:
        mine = process.stat().st_uid == os.getuid()
        fds = list((process / "fd").iterdir()) if mine else []
    except OSError:
        return  # it has ended, or this process may not look
    for fd in fds:
        with suppress(OSError):
            target = os.readlink(fd)
            lock = Path(target.removesuffix(_DELETED))
            if lock.name == LOCK and _is_held(process, fd):
                if target.endswith(_DELETED):
                    why: str | None = "and the folder was removed"
                else:
                    why = _unreachable(process, fd, lock)
                if why is not None:
                    yield RunningDaemon(int(process.name), lock.parent, why)


def _is_held(process: Path, fd: Path) -> bool:
    """Return whether the process has locked this file, and the file holds a process id, as a
    daemon's lock does."""
    if not _FLOCK.search((process / "fdinfo" / fd.name).read_text()):
        return False
    with fd.open("rb") as file:  # opens it anew, so the daemon's offset does not move
        return file.read(32).strip().isdigit()


def _unreachable(process: Path, fd: Path, lock: Path) -> str | None:
    """Return why no process here reaches the folder of this lock; "" if one does; None if no daemon
    listens in it."""
    if not (process / "root" / lock.parent.relative_to("/") / LIFELINE).is_socket():
        return None
    with suppress(OSError):
        if lock.samefile(fd):
            return ""
    return "in another mount namespace, as a container has"
