"""Decides when each stage starts, restarts and ends, and the run's status. Pure: no processes.

A method reports an event, with its time, and returns actions, in order. The run ends when no stage
runs or will start. A stage that fails for good ends all others; so does a stage with `ends_all`,
with any status. The status of the first such stage is the run's.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from signal import SIGKILL, SIGTERM, Signals
from typing import NamedTuple

from swapd.run.child import SIGNALLED
from swapd.run.file import StageSpec
from swapd.shared.units import seconds

#: Pauses before restarts double, up to this, or to the first if that is longer.
PAUSE_MAX_S = 60.0
_DOUBLED_MAX = 20
#: After running for so long, the next failure counts as the first.
WELL_AFTER_S = 300.0
#: The run's status if a stage waits for a condition that can never be met.
NEVER = 1


class StartStage(NamedTuple):
    name: str


class SignalStage(NamedTuple):
    name: str
    number: int


class Message(NamedTuple):
    text: str


Action = StartStage | SignalStage | Message


class _Phase(Enum):
    WAITING = "waits"
    #: The caller is carrying out its `StartStage`.
    STARTING = "starts"
    RUNNING = "runs"
    PAUSING = "pauses"
    ENDED = "ended"


class StageState:
    """Times are seconds of the caller's clock."""

    def __init__(self, stage: StageSpec) -> None:
        self.stage = stage
        self.now = _Phase.WAITING
        #: Whether the stages after it may start.
        self.up = False
        self.starts = 0
        #: Failures in a row, and the time of its last start.
        self.failures = 0
        self.since = 0.0
        #: Time of its restart, or of its kill.
        self.due: float | None = None
        #: Status of its last end; seconds from its start to that end, and to readiness.
        self.status: int | None = None
        self.took_s: float | None = None
        self.ready_s: float | None = None

    def end(self, status: int, now: float) -> None:
        self.status = status
        if self.now is _Phase.RUNNING:
            self.took_s = now - self.since
            if self.took_s >= WELL_AFTER_S:
                self.failures = 0
        self.now, self.due = _Phase.ENDED, None


class Stages:
    """All stages of a run. `begin`, then report events, and carry out the returned actions."""

    def __init__(self, stages: Mapping[str, StageSpec]) -> None:
        self.states = {name: StageState(stage) for name, stage in stages.items()}
        self.stopping = False
        self.ended_by: str | None = None
        #: Status of the stage that ended the run, else of the first that failed after a signal.
        self._status: int | None = None

    @property
    def status(self) -> int:
        return self._status or 0

    @property
    def over(self) -> bool:
        return all(state.now is _Phase.ENDED for state in self.states.values())

    @property
    def due(self) -> float | None:
        return min((at for s in self.states.values() if (at := s.due) is not None), default=None)

    @property
    def awaited(self) -> list[str]:
        """Running stages that must register a component, or answer, before others start."""
        before = {n for s in self.states.values() if s.now is _Phase.WAITING for n in s.stage.after}
        return [
            name
            for name, state in self.states.items()
            if name in before
            and not state.up
            and state.stage.ready in ("registered", "answers")
            and state.now is _Phase.RUNNING
        ]

    def is_starting(self, name: str) -> bool:
        """Tell whether its `StartStage` is still valid: another stage may have failed since."""
        return self.states[name].now is _Phase.STARTING

    # --- events ---------------------------------------------------------------------------

    def begin(self) -> list[Action]:
        return list(self._starts())

    def started(self, name: str, now: float) -> list[Action]:
        state = self.states[name]
        state.now, state.since, state.due = _Phase.RUNNING, now, None
        state.starts += 1
        return self.is_up(name, now) if state.stage.ready == "started" else []

    def is_up(self, name: str, now: float) -> list[Action]:
        """The condition in its `ready` holds. Repeated calls do nothing."""
        state = self.states[name]
        if not state.up:
            state.up, state.ready_s = True, now - state.since
        return list(self._starts())

    def ended(self, name: str, status: int, now: float) -> list[Action]:
        """All its processes have ended, or none could start. `status`: as in a shell."""
        state = self.states[name]
        state.end(status, now)
        if self.stopping:
            if self._status is None and status:
                self._status = status
            return []
        how = f"{name} ended with status {_named(status)}"
        if _again(state, status):
            return [self._pause(state, how, now)]
        if status or state.stage.ends_all:
            return [
                Message(f"{how}: the others are told to end"),
                *self._end_all(name, status, now),
            ]
        if state.stage.ready == "ended":
            return [Message(how), *self.is_up(name, now)]
        return [Message(how), *self._without(state, now)]

    def stop(self, number: int, now: float) -> list[Action]:
        """End all stages with this signal; kill them at the second call."""
        how = Signals(number).name
        if self.stopping:
            kills = (SignalStage(name, SIGKILL) for name in self._running())
            return [Message(f"{how}: all stages are killed"), *kills]
        return [
            Message(f"{how}: all stages are told to end; once more, and they are killed"),
            *self._tell(number, now),
        ]

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for name, state in self.states.items():
            if state.due is None or now < state.due:
                continue
            state.due = None
            if state.now is _Phase.PAUSING:
                state.now = _Phase.STARTING
                actions.append(StartStage(name))
            else:
                waited = seconds(state.stage.stop_timeout_s)
                why = f"{name} has not ended in {waited} (stop_timeout), and is killed"
                actions += [Message(why), SignalStage(name, SIGKILL)]
        return actions

    # --- consequences ---------------------------------------------------------------------

    def _starts(self) -> Iterator[Action]:
        for name, state in self.states.items():
            if state.now is _Phase.WAITING and all(self.states[n].up for n in state.stage.after):
                state.now = _Phase.STARTING
                yield StartStage(name)

    def _running(self) -> list[str]:
        return [name for name, state in self.states.items() if state.now is _Phase.RUNNING]

    def _tell(self, number: int, now: float) -> list[SignalStage]:
        self.stopping = True
        told = [SignalStage(name, number) for name in self._running()]
        for state in self.states.values():
            if state.now is _Phase.RUNNING:
                state.due = now + state.stage.stop_timeout_s
            else:
                state.now, state.due = _Phase.ENDED, None
        return told

    def _pause(self, state: StageState, how: str, now: float) -> Message:
        twice, first = min(state.failures, _DOUBLED_MAX), state.stage.backoff_s
        pause = min(max(PAUSE_MAX_S, first), first * 2**twice)
        state.failures += 1
        state.now, state.due = _Phase.PAUSING, now + pause
        of = "" if state.stage.retries is None else f" of {state.stage.retries}"
        return Message(f"{how}: it starts again in {seconds(pause)} (retry {state.failures}{of})")

    def _end_all(self, name: str, status: int, now: float) -> list[SignalStage]:
        self.ended_by, self._status = name, status
        return self._tell(SIGTERM, now)

    def _without(self, ended: StageState, now: float) -> list[Action]:
        if ended.up:
            return []
        name = ended.stage.name
        waiting = [s.stage for s in self.states.values() if s.now is _Phase.WAITING]
        left = [stage.name for stage in waiting if name in stage.after]
        if not left:
            return []
        why = (
            f"{name} has registered no component, and {', '.join(left)} would wait for ever (say "
            'ready = "ended" if it registers none)'
        )
        return [Message(f"{why}: the others are told to end"), *self._end_all(name, NEVER, now)]


def _again(state: StageState, status: int) -> bool:
    restart, retries = state.stage.restart, state.stage.retries
    wanted = restart == "always" or (restart == "on-failure" and status != 0)
    return wanted and (retries is None or state.failures < retries)


def _named(status: int) -> str:
    try:
        return f"{status} ({Signals(status - SIGNALLED).name})"
    except ValueError:
        return str(status)
