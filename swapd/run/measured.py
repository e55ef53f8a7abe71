"""Measures a command until it ends, or ends it itself.

A server does not end by itself. It gets SIGTERM some seconds after it is ready, or when a command
that uses it has ended.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

from swapd.run.child import SIGNALLED, caught, sent_by_terminal, started
from swapd.run.compared import Round
from swapd.run.ready import Ready, answers
from swapd.run.sampling import Sampler, descendants

#: A command has so long after SIGTERM; then all its processes are killed.
ENDS_IN_S = 60.0
#: Signals that usually end a command: measuring stops after one.
_ENDING = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)


class Until(NamedTuple):
    """The condition for ending a command that does not end by itself."""

    #: End it when this command has ended, which starts once it is ready.
    load: tuple[str, ...] = ()
    #: End it so many seconds after it is ready.
    span_s: float | None = None
    #: The address where it is ready; None: it is ready at once.
    ready: Ready | None = None

    def __bool__(self) -> bool:
        return bool(self.load) or self.span_s is not None


def run(
    words: Sequence[str], environment: Mapping[str, str], until: Until, sampler: Sampler
) -> Round:
    """Run it to its end. Main thread only: it passes signals on. Raises: CannotRun.

    The round has no outcomes yet: the daemons' logs have them.
    """
    measured = _Run(until, environment)
    with caught(measured.pass_on):
        try:
            measured.start(words)
            while not measured.over:
                sampler.sample()
                measured.step(max(0.0, sampler.due - time.monotonic()))
        finally:
            measured.end()
    return measured.ran(sampler)


class _Run:
    def __init__(self, until: Until, environment: Mapping[str, str]) -> None:
        self._until = until
        self._environment = environment
        self._began = time.monotonic()
        self._command: subprocess.Popen[bytes] | None = None
        self._load: subprocess.Popen[bytes] | None = None
        #: Seconds since the beginning.
        self._ready: float | None = None
        self._loaded: float | None = None
        self._whole = 0.0
        #: Times of its SIGTERM and its SIGKILL, by the same clock.
        self._end_at: float | None = None
        self._kill_at: float | None = None
        self._signal: int | None = None
        self._why = ""
        self._killed = False

    # --- signals -------------------------------------------------------------------------

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        if number in _ENDING:
            self._signal = self._signal or number
        if not sent_by_terminal(number):
            self._tell(number)

    def _tell(self, number: int) -> None:
        for process in (self._load, self._command):
            if process is not None:
                with suppress(ProcessLookupError):
                    process.send_signal(number)

    # --- from start to end ---------------------------------------------------------------

    def start(self, words: Sequence[str]) -> None:
        self._command = started(words, self._environment)
        if self._signal is not None:  # it came before the command ran
            self._tell(self._signal)

    @property
    def over(self) -> bool:
        return self._command is not None and self._command.poll() is not None

    def step(self, timeout_s: float) -> None:
        """Wait until one of the processes ends, `timeout_s` at most; then take the next step."""
        _wait([p for p in (self._command, self._load) if p is not None], timeout_s)
        now = self._whole = time.monotonic() - self._began
        loaded = self._load is not None and self._load.poll() is not None
        if self.over or self._signal is not None:
            return
        if self._until and self._ready is None:
            if self._until.ready is None or answers(self._until.ready):
                self._is_ready()
        elif loaded and self._loaded is None:
            self._loaded = self._end_at = now
        if self._kill_at is not None and now >= self._kill_at and not self._killed:
            self._kill()
        elif self._end_at is not None and now >= self._end_at and self._kill_at is None:
            self._kill_at = now + ENDS_IN_S
            self._tell(signal.SIGTERM)

    def _is_ready(self) -> None:
        self._ready = time.monotonic() - self._began
        if self._until.load:
            self._load = started(self._until.load, self._environment)
        if self._until.span_s is not None:
            self._end_at = self._ready + self._until.span_s

    def _kill(self) -> None:
        self._killed = True
        self._why = f"it did not end within {ENDS_IN_S:.0f} s of SIGTERM, and was killed"
        assert self._command is not None
        for pid in (self._command.pid, *descendants(self._command.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End both processes; blocks until they have ended."""
        self._whole = time.monotonic() - self._began
        for process in (self._load, self._command):
            if process is None:
                continue
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(ENDS_IN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ran(self, sampler: Sampler) -> Round:
        assert self._command is not None
        load_s = None
        if self._loaded is not None and self._ready is not None:
            load_s = self._loaded - self._ready
        status, why = self._status()
        ready_s = self._ready if self._until.ready is not None else None
        return Round(
            status=status,
            whole_s=self._whole,
            ready_s=ready_s,
            load_s=load_s,
            host_bytes=sampler.host_bytes,
            device_bytes=sampler.device_bytes,
            why=why,
            signal=self._signal,
        )

    def _status(self) -> tuple[int, str]:
        assert self._command is not None
        own = _shell(self._command.returncode)
        if self._signal is not None or not self._until:
            return own, ""
        if self._killed:
            return own, self._why
        if self._end_at is None or self._kill_at is None:  # before its SIGTERM
            return own or 1, "it ended by itself, before it was told to"
        if self._load is not None and (load := _shell(self._load.returncode)):
            return load, f"{self._until.load[0]} ended with status {load}"
        return 0, ""


def _shell(status: int) -> int:
    return status if status >= 0 else SIGNALLED - status


def _wait(processes: Sequence["subprocess.Popen[bytes]"], timeout_s: float) -> None:
    """Wait until one of them ends that still runs."""
    poll, opened = select.poll(), []
    try:
        for process in processes:
            if process.returncode is None:
                opened.append(fd := os.pidfd_open(process.pid))
                poll.register(fd, select.POLLIN)
        poll.poll(timeout_s * 1000)
    finally:
        for fd in opened:
            os.close(fd)
