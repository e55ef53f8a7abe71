"""The memory that control groups leave this process: its own group, and all above it."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_SELF = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
#: Limit and use of memory, in version 2 and in version 1.
_FILES_2 = ("memory.max", "memory.current")
_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
#: How version 1 says "no limit": the largest number of whole pages in 63 bits.
_NO_LIMIT = 1 << 62


class Group(NamedTuple):
    """A group with a limit on memory, in bytes. `path`: where its files are."""

    path: Path
    limit: int
    used: int


def groups() -> list[Group]:
    """Those with a limit among the groups that this process is in. Where a container sees only its
    own, that one; raises nothing."""
    return [group for path, files in _folders() if (group := _group(path, files)) is not None]


def least_limit() -> Group | None:
    """The group with the least limit, if there is one."""
    return min(groups(), key=lambda group: group.limit, default=None)


def available(nbytes: int) -> int:
    """What the groups leave of `nbytes`."""
    return min((group.limit - group.used for group in groups()), default=nbytes)


def _folders() -> Iterator[tuple[Path, tuple[str, str]]]:
    """The folders of this process's groups, from its own up to the mount, with their files."""
    lines = ["0::/", "1:memory:/"]
    with suppress(OSError):
        lines += _SELF.read_text().splitlines()
    seen = set()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, files = (_MOUNT / "memory", _FILES_1) if controllers else (_MOUNT, _FILES_2)
        # a path above the root of this process's own namespace begins with ".."
        below = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(below), -1, -1):
            group = mount.joinpath(*below[:depth]), files
            if group not in seen:
                seen.add(group)
                yield group


def _group(path: Path, files: tuple[str, str]) -> Group | None:
    try:
        limit, used = (int((path / name).read_text()) for name in files)
    except (OSError, ValueError):  # not there, or the limit is "max"
        return None
    return Group(path, limit, used) if limit < _NO_LIMIT else None
