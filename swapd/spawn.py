"""Starts a private daemon with a temporary folder, for demo, bench and tests."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from swapd.shared.config import flag
from swapd.shared.errors import UserError

#: A daemon that has not stopped by then is killed.
STOP_S = 20.0
#: Most bytes to show of the output of a daemon that did not start.
_SAID_BYTES = 4096

_PR_SET_PDEATHSIG = 1
#: Loaded here: loading a library in the forked child of a threaded process may deadlock.
_libc = ctypes.CDLL(None)

#: Arguments for Python; settings follow as flags.
SERVE = ("-m", "swapd", "serve")


class SpawnError(UserError):
    """The daemon did not start. The message is its own error."""


@dataclass(frozen=True, slots=True)
class Spawned:
    folder: Path
    process: "subprocess.Popen[bytes]"

    @property
    def pid(self) -> int:
        return self.process.pid


def environment() -> dict[str, str]:
    """Return this process's environment without the user's settings of swapd, meant for other
    daemons."""
    return {k: v for k, v in os.environ.items() if not k.startswith("SWAPD_")}  # noqa: TID251


@contextmanager
def daemon(program: Sequence[str] = SERVE, /, **settings: object) -> Iterator[Spawned]:
    """Run `swapd serve`, or another `program` that takes its flags, with these settings until the
    block or this thread ends.

    Blocks until it serves. Raises: SpawnError with the daemon's error.
    """
    with (
        tempfile.TemporaryDirectory(prefix="swapd-") as folder,
        tempfile.TemporaryFile() as errors,  # a pipe that nobody reads would stop it when full
    ):
        settings = {"runtime_dir": folder, "device": "host", **settings}
        command = [sys.executable, *program]
        for name, value in settings.items():
            command += [flag(name), str(value)]
        process = started(command, errors, env=environment(), preexec_fn=end_with_parent)
        try:
            yield Spawned(Path(folder), process)
        finally:
            stop(process)


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process if its parent dies, or the thread of it that
    started this process; call it in the child."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that this thread starts in the block hear no Ctrl-C of the terminal: this process
    ends them, and its own Ctrl-C comes after the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def started(command: Sequence[str], errors: IO[bytes], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a daemon, and block until it serves: until it writes a line. `options`: for `Popen`.

    Raises: SpawnError with the last of what it wrote to `errors`.
    """
    began = errors.seek(0, os.SEEK_END)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, **options)
    try:
        assert process.stdout is not None
        if process.stdout.readline():
            return process
        process.communicate()
    except BaseException:
        stop(process)
        raise
    errors.seek(max(began, errors.seek(0, os.SEEK_END) - _SAID_BYTES))
    words = errors.read().decode(errors="replace").strip()
    lines = (line.removeprefix("swapd: ") for line in words.splitlines())  # a command says it, too
    raise SpawnError("\n".join(lines) or "swapd serve ended at once")


def stop(process: "subprocess.Popen[Any]") -> None:
    """Tell a daemon to end, and kill it if it does not. Blocks until it has ended."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
