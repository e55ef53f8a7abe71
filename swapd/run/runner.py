"""Starts, signals and awaits the processes of stages, as `stages.py` decides.

Each stage is a process group in its own session, so the terminal's signals come through here. A
stage has ended when its last process has.
"""

import ctypes
import itertools
import math
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

from swapd.run.child import CANNOT_RUN, HARMLESS, SIGNALLED, CannotRun, caught, started
from swapd.run.file import StageSpec
from swapd.run.guard import GroupGuard
from swapd.run.output import Output, Pipe
from swapd.run.stages import Action, Message, SignalStage, Stages, StartStage
from swapd.shared.config import STAGE_VARIABLE

#: Pauses between two checks: while stages wait for another to be ready, and otherwise.
_ASK_S = 0.1
_IDLE_S = 1.0
#: After so many seconds a killed process is gone, or cannot be awaited.
_KILLED_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36


class _Child:
    def __init__(
        self, stage: StageSpec, start: int, process: "subprocess.Popen[bytes]", pipe: Pipe
    ) -> None:
        self.stage = stage
        self.start = start
        self.pipe = pipe
        #: Status of the first process, once it has ended; others of its group may still run.
        self.status: int | None = None
        #: Time at which these others are killed; then the time at which they are given up.
        self.kill_at = math.inf
        self._killed = False
        self._process, self.group = process, process.pid

    def tell(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, number)

    def is_over(self, now: float) -> bool:
        """Tell whether all its processes have ended; signal those that outlive the first."""
        if self.status is None:
            if (code := self._process.poll()) is None:
                return False
            self.status = code if code >= 0 else SIGNALLED - code
            self.kill_at = now + self.stage.stop_timeout_s
            self.tell(signal.SIGTERM)
        elif self.kill_at <= now:
            if self._killed:  # another user's process, or one whose parent does not reap it
                return True
            self._killed, self.kill_at = True, now + _KILLED_S
            self.tell(signal.SIGKILL)
        return self._is_empty()

    def _is_empty(self) -> bool:
        with suppress(ChildProcessError):
            while os.waitpid(-self.group, os.WNOHANG)[0]:
                pass
        try:
            os.killpg(self.group, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # a process runs as another user now
            pass
        return False


class Runner:
    """Main thread only: it catches signals."""

    def __init__(
        self,
        stages: Mapping[str, StageSpec],
        environment: Mapping[str, str],
        output: Output,
        ready: Callable[[Collection[str]], Collection[str]],
        while_it_runs: Callable[[], None],
        others: Collection[int] = (),
    ) -> None:
        """`ready(names)` returns which of these stages have registered a component, or answer;
        called while stages wait for that. `while_it_runs`: called at least once a second.
        `others`: child processes whose ends the caller awaits."""
        self._specs = stages
        self.stages = Stages(stages)
        self._environment = environment
        self._output = output
        self._ready = ready
        self._while_it_runs = while_it_runs
        self.signal: int | None = None
        self._children: dict[str, _Child] = {}
        self._guard = GroupGuard()
        self._others = {*others, self._guard.pid}
        self._numbers = itertools.count()
        self._came: deque[int] = deque()

    def run(self) -> int:
        """Block until all processes of all stages have ended; return the run's exit status."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # adopt orphans of stages
        with _woken(self._came) as woken:
            try:
                self._do(self.stages.begin())
                while not self.stages.over:
                    select.select([woken], [], [], self._wait_s())
                    with suppress(BlockingIOError):
                        os.read(woken, 4096)
                    self._step(time.monotonic())
            finally:
                self._guard.close()
        return self.stages.status

    def _wait_s(self) -> float:
        due = [child.kill_at for child in self._children.values()] + [self.stages.due]
        latest = _ASK_S if self.stages.awaited else _IDLE_S
        now = time.monotonic()
        return min([latest, *(max(0.0, at - now) for at in due if at is not None)])

    def _step(self, now: float) -> None:
        while self._came:
            self._signal(self._came.popleft(), now)
        over = [(name, child) for name, child in self._children.items() if child.is_over(now)]
        self._reap_adopted()
        for name, child in over:
            del self._children[name]
            self._guard.forget(child.start)
            self._output.ends(child.pipe)
            assert child.status is not None
            self._do(self.stages.ended(name, child.status, now))
        if self._output.broken and not self.stages.stopping:  # a second call would kill them
            self._do(self.stages.stop(signal.SIGTERM, now))
        self._do(self.stages.tick(now))
        if awaited := self.stages.awaited:
            for name in self._ready(awaited):
                self._do(self.stages.is_up(name, now))
        self._while_it_runs()

    def _reap_adopted(self) -> None:
        """Reap processes that have left the group of their stage, or they stay as zombies."""
        ours = self._others.union(child.group for child in self._children.values())
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (found := os.waitid(os.P_ALL, 0, look)) is not None and found.si_pid not in ours:
            os.waitpid(found.si_pid, 0)

    def _signal(self, number: int, now: float) -> None:
        if number == signal.SIGCHLD:
            return
        if number not in HARMLESS:
            self.signal = self.signal or number
            return self._do(self.stages.stop(number, now))
        for child in self._children.values():
            child.tell(number)

    def _do(self, actions: list[Action]) -> None:
        left = deque(actions)
        while left:
            match left.popleft():
                case StartStage(name):
                    left.extend(self._start(self._specs[name]))
                case SignalStage(name, number):
                    self._children[name].tell(number)
                case Message(text):
                    self._output.say(text)

    def _start(self, stage: StageSpec) -> list[Action]:
        if not self.stages.is_starting(stage.name):
            return []
        start, pipe, ours = next(self._numbers), None, {STAGE_VARIABLE: stage.name}
        try:
            pipe = self._output.begins(stage.name)
            process = started(
                stage.command.words,
                # Python would buffer its output, as that is not a terminal
                {"PYTHONUNBUFFERED": "1", **self._environment, **stage.environment, **ours},
                stage.directory,
                partial(self._guard.watch, start),
                stdin=subprocess.DEVNULL,
                stdout=pipe.theirs,
                stderr=pipe.theirs,
                start_new_session=True,
            )
        except (CannotRun, OSError) as exc:
            self._guard.forget(start)
            self._output.say(f"{stage.name}: {exc}")
            if pipe is not None:
                self._output.ends(pipe)
            status = exc.status if isinstance(exc, CannotRun) else CANNOT_RUN
            return self.stages.ended(stage.name, status, time.monotonic())
        finally:
            if pipe is not None:
                os.close(pipe.theirs)
        self._children[stage.name] = _Child(stage, start, process, pipe)
        return self.stages.started(stage.name, time.monotonic())


@contextmanager
def _woken(came: deque[int]) -> Iterator[int]:
    """Yield a descriptor that is readable after a signal or a child's end; append signals to
    `came`."""

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    was = signal.signal(signal.SIGCHLD, note)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with caught(note):
            yield reader
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGCHLD, was)
        os.close(reader)
        os.close(writer)
