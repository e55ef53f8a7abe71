"""Ends what stages have left when `swapd run` itself is killed: a process that only waits for that.

The kernel tells the first process of a stage alone; a program that a shell has started would go on,
and keep its memory of the GPU. `python -I -S guard.py` is the process. A line of its stdin is the
number of a start and its process group, or 0 when that is no more; the end of it is that of
`swapd run`. It imports nothing of swapd.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

#: What has not ended so long after SIGTERM is killed.
_TERM_S = 30.0
_LOOK_S = 0.05


class Guard:
    """That process, as `swapd run` has it."""

    def __init__(self) -> None:
        """Raises: OSError."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, start: int) -> None:
        """To be called by the first process of a group, before it runs a program: afterwards would
        be too late if `swapd run` is killed in between. `start`: any number, once."""
        self._write(f"{start} {os.getpid()}\n")

    def forget(self, start: int) -> None:
        """No process of its group is left, or there never was one."""
        self._write(f"{start} 0\n")

    def close(self) -> None:
        """What it still watches ends."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody has killed it: the first processes are told all the same
            os.write(self._process.stdin.fileno(), line.encode())


def _main() -> None:
    groups: dict[int, int] = {}
    for line in sys.stdin.buffer:
        start, group = map(int, line.split())
        groups[start] = group
    left = [group for group in groups.values() if group]
    if _left(left, signal.SIGTERM):
        _left(left, signal.SIGKILL)


def _left(groups: Iterable[int], number: int) -> set[int]:
    """Those that are there a while after they got a signal."""
    left = {group for group in groups if _tell(group, number)}
    until = time.monotonic() + _TERM_S
    while left and time.monotonic() < until:
        time.sleep(_LOOK_S)
        left = {group for group in left if _tell(group, 0)}
    return left


def _tell(group: int, number: int) -> bool:
    """Whether there was such a group."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    _main()
