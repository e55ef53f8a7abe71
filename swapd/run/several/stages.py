"""When each stage starts, starts again and ends, and what the run ends with. Pure: no processes.

Something happens (a method is called, with the time), and actions come back, in order. The run ends
when no stage runs or is still to start. A stage that fails and is not started again ends the
others; the first such status is the run's. So does one that is to end all, whatever its status.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from signal import Signals
from typing import NamedTuple

from swapd.run.child import SIGNALLED
from swapd.run.several.file import Stage
from swapd.shared.units import seconds

#: A pause before a start is twice the one before, and at most so long.
PAUSE_MAX_S = 60.0
_DOUBLED_MAX = 20
#: What ran for so long was well: the next failure of it is its first.
WELL_AFTER_S = 300.0
#: The run's, if a stage waits for what can never be.
NEVER = 1


class Start(NamedTuple):
    name: str


class Signal(NamedTuple):
    """To all processes of a stage."""

    name: str
    number: int


class Kill(NamedTuple):
    """All processes of a stage."""

    name: str


class Say(NamedTuple):
    text: str


Action = Start | Signal | Kill | Say


class _Is(Enum):
    #: For those that it starts after.
    WAITING = "waits"
    #: Whoever got its `Start` does that now.
    STARTING = "starts"
    RUNNING = "runs"
    #: Until it is started again.
    PAUSING = "pauses"
    ENDED = "ended"


class _State:
    """Of one stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.now = _Is.WAITING
        #: Those after it may start.
        self.up = False
        self.starts = 0
        #: In a row, and the time at which it was last started.
        self.failures = 0
        self.since = 0.0
        #: When it is started again, or killed as it was told to end long ago.
        self.due: float | None = None
        #: Of its last end.
        self.status: int | None = None


class Told(NamedTuple):
    """What became of a stage."""

    starts: int
    status: int | None


class Stages:
    """All stages of a run. `begin`, then say what happens, and do what comes back."""

    def __init__(self, stages: Mapping[str, Stage], terminate: int) -> None:
        """`terminate`: the signal for stages that end because another has failed."""
        self._states = {name: _State(stage) for name, stage in stages.items()}
        self._terminate = terminate
        self._stopping = False
        #: Of the stage that ended the run, else of the first that failed after a signal.
        self._status: int | None = None

    @property
    def status(self) -> int:
        """The run's: 0 if no stage failed for good."""
        return self._status or 0

    @property
    def over(self) -> bool:
        return all(state.now is _Is.ENDED for state in self._states.values())

    @property
    def due(self) -> float | None:
        """When `tick` has something to do."""
        return min((at for s in self._states.values() if (at := s.due) is not None), default=None)

    @property
    def awaited(self) -> list[str]:
        """Stages that run, and have to register a component before others start."""
        before = {n for s in self._states.values() if s.now is _Is.WAITING for n in s.stage.after}
        return [
            name
            for name, state in self._states.items()
            if name in before
            and not state.up
            and state.stage.ready == "registered"
            and state.now is _Is.RUNNING
        ]

    def told(self) -> dict[str, Told]:
        """What became of each."""
        return {name: Told(state.starts, state.status) for name, state in self._states.items()}

    def is_starting(self, name: str) -> bool:
        """Whether its `Start` still holds: another stage may have failed since."""
        return self._states[name].now is _Is.STARTING

    # --- what happens ---------------------------------------------------------------------

    def begin(self) -> list[Action]:
        return list(self._starts())

    def started(self, name: str, now: float) -> list[Action]:
        """A process of it runs."""
        state = self._states[name]
        state.now, state.since, state.due = _Is.RUNNING, now, None
        state.starts += 1
        return self.is_up(name) if state.stage.ready == "started" else []

    def is_up(self, name: str) -> list[Action]:
        """It is what its `ready` says. More than once is once."""
        self._states[name].up = True
        return list(self._starts())

    def ended(self, name: str, status: int, now: float) -> list[Action]:
        """No process of it runs any more, or none could be started. `status`: as a shell has it."""
        state = self._states[name]
        state.status = status
        if state.now is _Is.RUNNING and now - state.since >= WELL_AFTER_S:
            state.failures = 0
        state.now, state.due = _Is.ENDED, None
        if self._stopping:
            if self._status is None and status:
                self._status = status
            return []
        how = f"{name} ended with status {_named(status)}"
        if _again(state, status):
            return [self._pause(state, how, now)]
        if status or state.stage.ends_all:
            return [Say(f"{how}: the others are told to end"), *self._end_all(status, now)]
        if state.stage.ready == "ended":
            return [Say(how), *self.is_up(name)]
        return [Say(how), *self._without(state, now)]

    def stop(self, number: int, now: float) -> list[Action]:
        """All are to end: with that signal, and at the second time at once."""
        how = Signals(number).name
        if self._stopping:
            return [Say(f"{how}: all stages are killed"), *map(Kill, self._running())]
        return [
            Say(f"{how}: all stages are told to end; once more, and they are killed"),
            *self._tell(number, now),
        ]

    def tick(self, now: float) -> list[Action]:
        """It is `due`."""
        actions: list[Action] = []
        for name, state in self._states.items():
            if state.due is None or now < state.due:
                continue
            state.due = None
            if state.now is _Is.PAUSING:
                state.now = _Is.STARTING
                actions.append(Start(name))
            else:
                waited = seconds(state.stage.stop_timeout_s)
                why = f"{name} has not ended in {waited} (stop_timeout), and is killed"
                actions += [Say(why), Kill(name)]
        return actions

    # --- what follows ---------------------------------------------------------------------

    def _starts(self) -> Iterator[Action]:
        for name, state in self._states.items():
            if state.now is _Is.WAITING and all(self._states[n].up for n in state.stage.after):
                state.now = _Is.STARTING
                yield Start(name)

    def _running(self) -> list[str]:
        return [name for name, state in self._states.items() if state.now is _Is.RUNNING]

    def _tell(self, number: int, now: float) -> list[Signal]:
        """All that run are to end, and no other starts."""
        self._stopping = True
        told = [Signal(name, number) for name in self._running()]
        for state in self._states.values():
            if state.now is _Is.RUNNING:
                state.due = now + state.stage.stop_timeout_s
            else:
                state.now, state.due = _Is.ENDED, None
        return told

    def _pause(self, state: _State, how: str, now: float) -> Say:
        twice = min(state.failures, _DOUBLED_MAX)
        pause = min(PAUSE_MAX_S, state.stage.backoff_s * 2**twice)
        state.failures += 1
        state.now, state.due = _Is.PAUSING, now + pause
        of = "" if state.stage.retries is None else f" of {state.stage.retries}"
        return Say(f"{how}: it starts again in {seconds(pause)} (retry {state.failures}{of})")

    def _end_all(self, status: int, now: float) -> list[Action]:
        self._status = status
        return [*self._tell(self._terminate, now)]

    def _without(self, ended: _State, now: float) -> list[Action]:
        """A stage is done. Those after it that can never start any more have the run fail."""
        if ended.up:
            return []
        name = ended.stage.name
        left = [s.stage.name for s in self._states.values() if _waits_for(s, name)]
        if not left:
            return []
        why = f"{name} has registered no component, and {', '.join(left)} would wait for ever"
        return [Say(f"{why}: the others are told to end"), *self._end_all(NEVER, now)]


def _again(state: _State, status: int) -> bool:
    restart, retries = state.stage.restart, state.stage.retries
    wanted = restart == "always" or (restart == "on-failure" and status != 0)
    return wanted and (retries is None or state.failures < retries)


def _waits_for(state: _State, name: str) -> bool:
    return state.now is _Is.WAITING and name in state.stage.after


def _named(status: int) -> str:
    try:
        return f"{status} ({Signals(status - SIGNALLED).name})"
    except ValueError:
        return str(status)
