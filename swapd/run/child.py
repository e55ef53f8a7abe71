"""Runs the command of `swapd run`: a child that gets its parent's signals."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from swapd.spawn import end_with_parent
from swapd_client.errors import SwapdError

#: A terminal itself sends these to its foreground group.
_BY_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
#: Signals that do not end a run.
HARMLESS = (signal.SIGUSR1, signal.SIGUSR2)
PASSED_ON = (*_BY_TERMINAL, signal.SIGTERM, signal.SIGHUP, *HARMLESS)
#: A shell's status for a command that cannot run, that is missing, and that a signal has ended.
CANNOT_RUN, NOT_FOUND, SIGNALLED = 126, 127, 128


class CannotRun(SwapdError):
    """`status`: a shell's status for a command that could not start."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def run(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, int | None]:
    """Run a command to its end, and pass signals on to it. Main thread only.

    Returns its exit status, as in a shell, and the first signal that was to end it, if any. Raises:
    CannotRun.
    """
    process: subprocess.Popen[bytes] | None = None
    came: list[int] = []
    early: list[int] = []

    def tell(number: int) -> None:
        if process is None:
            early.append(number)
        elif not (number in _BY_TERMINAL and _in_foreground()):
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def pass_on(number: int, frame: FrameType | None) -> None:
        came.append(number)
        tell(number)

    with caught(pass_on):
        process = started(words, environment)
        for number in early:
            tell(number)
        status = process.wait()
    ended = status if status >= 0 else SIGNALLED - status
    return ended, next((number for number in came if number not in HARMLESS), None)


@contextmanager
def caught(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the signals in PASSED_ON; ignored signals stay ignored."""
    before: dict[int, Any] = {}
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for passed_on, was in before.items():
            signal.signal(passed_on, was)


def started(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path | None = None,
    first: Callable[[], None] | None = None,
    **options: Any,
) -> "subprocess.Popen[bytes]":
    """Start a child that ends with this process. The child calls `first` before the program runs.
    `options`: for `Popen`.

    Raises: CannotRun.
    """

    def prepare() -> None:
        end_with_parent()
        if first is not None:
            first()

    try:
        return subprocess.Popen(words, env=environment, cwd=folder, preexec_fn=prepare, **options)
    except FileNotFoundError as exc:
        if folder is not None and not folder.is_dir():
            raise CannotRun(
                f"there is no folder {folder}: make it, or say another", CANNOT_RUN
            ) from exc
        raise CannotRun(
            f"there is no command {words[0]!r}: install it, or write its whole path", NOT_FOUND
        ) from exc
    except OSError as exc:
        raise CannotRun(
            f"{words[0]!r} cannot be run: {exc.strerror}; is it an executable program?", CANNOT_RUN
        ) from exc


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False
