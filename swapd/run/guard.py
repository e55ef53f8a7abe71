"""A process that ends the stages' processes if `swapd run` itself is killed.

The kernel signals only the first process of a stage. A program started by the stage's shell would
go on, and keep its GPU memory. `python -I -S guard.py` is the process; it imports nothing of swapd.
Each line of its stdin has the number of a start and its process group, or 0 once that group has
ended. At end of file `swapd run` has ended.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress

#: Seconds between SIGTERM and SIGKILL for a group.
_TERM_S = 30.0
_LOOK_S = 0.05


class GroupGuard:
    def __init__(self) -> None:
        """Raises: OSError."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def watch(self, start: int) -> None:
        """Report a group, from its first process before it runs a program: later, `swapd run` could
        be killed in between. `start`: a number that no other start has."""
        self._write(f"{start} {os.getpid()}\n")

    def forget(self, start: int) -> None:
        self._write(f"{start} 0\n")

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # the guard is dead: the kernel signals the first processes
            os.write(self._process.stdin.fileno(), line.encode())


def _main() -> None:
    groups: dict[int, int] = {}
    for line in sys.stdin.buffer:
        start, group = map(int, line.split())
        if group:
            groups[start] = group
        else:
            groups.pop(start, None)
    if _left(groups.values(), signal.SIGTERM):
        _left(groups.values(), signal.SIGKILL)


def _left(groups: Iterable[int], number: int) -> set[int]:
    left = {group for group in groups if _tell(group, number)}
    until = time.monotonic() + _TERM_S
    while left and time.monotonic() < until:
        time.sleep(_LOOK_S)
        left = {group for group in left if _tell(group, 0)}
    return left


def _tell(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    _main()
