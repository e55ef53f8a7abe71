"""Checks whether the machine was quiet during a measurement; if not, its figure is not judged.

Before and after each measurement a plain loop runs alone: it shows the machine's speed, and how
long its thread waits for a CPU. The kernel's counters show the CPU time of other processes in
between, and the time that the hypervisor took. Missing counters (another kernel, a container) are
named, and the rest is checked.
"""

import os
import resource
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

Measured = TypeVar("Measured")

#: A probe is the quietest of several slices: leftovers of the last measurement end in the first.
SLICES = 3
SLICE_S = 0.02
#: Largest share of a probe's time spent waiting for a CPU.
WAITED_MAX = 0.1
#: Largest share of busy CPU time that the hypervisor may give to others.
STEAL_MAX = 0.02
#: CPUs that other processes may use, if fewer than NEEDED_CPUS are left.
OTHERS_MAX_CPUS = 0.25
NEEDED_CPUS = 2
#: Longest time of the plain loop, in units of its best.
SLOWER_MAX = 1.5
#: Least share of the elapsed time that the kernel's counts must cover.
_COUNTED_MIN = 0.5
STEP_MAX_S = 1e-3
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: What is unknown without /proc/stat.
_OF_STAT = "steal time, and the CPU time of other processes"


class Conditions(msgspec.Struct, frozen=True):
    """The machine's state during a measurement. None: unknown."""

    #: Microseconds of a pass of the plain loop, before or after: the slower.
    loop_us: float
    #: Share of that time spent waiting for a CPU.
    waited: float | None
    #: CPUs that other processes, and the kernel for them, kept busy.
    others_cpus: float | None = None
    #: Share of busy CPU time that the hypervisor gave to others.
    steal: float | None = None


class Surroundings(msgspec.Struct, frozen=True):
    """The machine in one run. `loop_us` is the plain loop's best."""

    cpus: int
    loop_us: float
    conditions: dict[str, Conditions]
    #: What the kernel does not report.
    not_probed: list[str]


class CpuTimes(NamedTuple):
    """Seconds of all CPUs that this process may use, since boot."""

    cpus: int
    counted_s: float
    idle_s: float
    #: None if the kernel does not count it.
    steal_s: float | None

    def since(self, before: "CpuTimes") -> "CpuTimes":
        steal_s = None if self.steal_s is None else self.steal_s - (before.steal_s or 0.0)
        return CpuTimes(
            self.cpus, self.counted_s - before.counted_s, self.idle_s - before.idle_s, steal_s
        )


class Machine:
    """Watches one run. Not thread-safe: nothing else in this process may run while it probes."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._loop = Loop()
        self._cpus = os.sched_getaffinity(0)
        self._best_us = float("inf")
        #: The probe after the last measurement, which is also the one before the next.
        self._last: Conditions | None = None
        self._conditions: dict[str, Conditions] = {}
        self._not_probed: dict[str, None] = {}
        self._step_s = clock_step_s()
        if self._step_s > STEP_MAX_S:
            self._not_probed[f"waiting for a CPU: CPU time has steps of {self._step_s:g} s"] = None
        self._loop.run(SLICE_S)  # warms up the interpreter

    def watch(self, name: str, measure: Callable[[], Measured]) -> Measured:
        """Run `measure` and return its result. Its child processes must have ended by then."""
        before = self._last or self._probe()
        times, own_s, began = self._times(), _own_s(), time.monotonic()
        result = measure()
        took_s, own_s = time.monotonic() - began, _own_s() - own_s
        others_cpus, steal = self._meanwhile(times, took_s, own_s)
        self._last = after = self._probe()
        self._conditions[name] = Conditions(
            max(before.loop_us, after.loop_us),
            max((s.waited for s in (before, after) if s.waited is not None), default=None),
            others_cpus,
            steal,
        )
        return result

    def surroundings(self) -> Surroundings:
        return Surroundings(
            len(self._cpus), self._best_us, dict(self._conditions), list(self._not_probed)
        )

    def _probe(self) -> Conditions:
        slices = [self._slice() for _ in range(SLICES)]
        quietest = min(slices, key=lambda found: found.waited or 0.0)
        self._best_us = min(self._best_us, quietest.loop_us)
        return quietest

    def _slice(self) -> Conditions:
        ran, began = time.thread_time(), time.perf_counter()
        loop_us = self._loop.run(SLICE_S).us
        took, ran = time.perf_counter() - began, time.thread_time() - ran
        known = self._step_s <= STEP_MAX_S
        return Conditions(loop_us, max(_share(took - ran, took), 0.0) if known else None)

    def _meanwhile(
        self, before: CpuTimes | None, took_s: float, own_s: float
    ) -> tuple[float | None, float | None]:
        after = self._times()
        if before is None or after is None:
            return None, None
        passed, capacity_s = after.since(before), after.cpus * took_s
        if passed.counted_s <= _COUNTED_MIN * capacity_s:
            self._not_probed[f"{_OF_STAT}: {self._stat} does not count here"] = None
            return None, None
        if passed.steal_s is None:
            self._not_probed[f"steal time: {self._stat} has none"] = None
        worked_s = max(capacity_s - passed.idle_s, 0.0)
        others_s = max(worked_s - (passed.steal_s or 0.0) - own_s, 0.0)
        steal = None if passed.steal_s is None else _share(passed.steal_s, worked_s)
        return _share(others_s, took_s), steal

    def _times(self) -> CpuTimes | None:
        try:
            return cpu_times(self._stat.read_text(), self._cpus)
        except (OSError, ValueError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else exc
            self._not_probed[f"{_OF_STAT}: {self._stat}: {why}"] = None
            return None


def cpu_times(stat: str, cpus: set[int]) -> CpuTimes:
    """Return the counts of `cpus` in the text of /proc/stat. Raises: ValueError if they are
    missing."""
    rows = []
    for line in stat.splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            rows.append([int(count) for count in counts])
    least = min(map(len, rows), default=0)
    if len(rows) < len(cpus) or least <= _IDLE:
        raise ValueError("lacks the times of the CPUs that this process may use")
    ticks = [sum(column) for column in zip(*rows, strict=False)]
    return CpuTimes(
        cpus=len(rows),
        counted_s=sum(ticks[: _STEAL + 1]) / _TICKS_PER_S,
        idle_s=sum(ticks[_IDLE : _IO_WAIT + 1]) / _TICKS_PER_S,
        steal_s=ticks[_STEAL] / _TICKS_PER_S if least > _STEAL else None,
    )


#: Columns of the counts; those after steal are parts of others.
_IDLE, _IO_WAIT, _STEAL = 3, 4, 7


def too_busy(found: Conditions, surroundings: Surroundings) -> str:
    """Return why figures of that time are not judged, or ""."""
    reasons = []
    if found.waited is not None and found.waited > WAITED_MAX:
        reasons.append(f"waited {100 * found.waited:.0f} % of the time for a CPU")
    others, cpus = found.others_cpus or 0.0, surroundings.cpus
    if others > OTHERS_MAX_CPUS and cpus - others < NEEDED_CPUS:
        reasons.append(f"other processes used {others:.1f} of {cpus} CPUs")
    if found.steal is not None and found.steal > STEAL_MAX:
        reasons.append(f"steal {100 * found.steal:.0f} %")
    slower = _share(found.loop_us, surroundings.loop_us)
    if slower > SLOWER_MAX:
        reasons.append(f"a plain loop took {slower:.1f} times as long as at best")
    return ", ".join(reasons)


def clock_step_s() -> float:
    """Return the smallest step of `time.thread_time`."""
    began = time.thread_time()
    while (now := time.thread_time()) == began:
        pass
    return now - began


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _own_s() -> float:
    """Return the CPU seconds of this process and its reaped children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


# --- the plain loop --------------------------------------------------------------------------

#: Microseconds of a pass on the CPU for which the limits in microseconds were set.
REFERENCE_US = 7.3

_THINGS = 600
_STEPS = 12
#: Passes between looks at the clock, each of which is a system call.
_BETWEEN_LOOKS = 16


class _Item:
    __slots__ = ("holders", "name", "size", "used")

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.used = 0
        self.holders: dict[int, None] = {}


class _Taken(NamedTuple):
    time: int
    thing: _Item
    holder: int


class Pace(NamedTuple):
    passes: int
    #: CPU time, which excludes waits on a busy machine.
    seconds: float

    @property
    def us(self) -> float:
        return self.seconds / self.passes * 1e6


class Loop:
    """Takes things in turn, looks at them, and gives them back.

    Its work is like the core's: small objects, attributes, dicts, small functions and short sorts.
    It runs in turn with the measurements, so that a slow machine slows both.
    """

    def __init__(self) -> None:
        self._things = {f"thing-{i}": _Item(f"thing-{i}", i * 7 % 13 + 1) for i in range(_THINGS)}
        self._names = list(self._things)
        self._idle = dict.fromkeys(self._names)
        self._taken: deque[_Taken] = deque()
        self._now = 0

    def run(self, for_s: float) -> Pace:
        """Run for about `for_s` seconds of CPU time."""
        began = time.thread_time()
        passes, took_s = 0, 0.0
        while took_s < for_s or not passes:
            for _ in range(_BETWEEN_LOOKS):
                self._pass()
            passes += _BETWEEN_LOOKS
            took_s = time.thread_time() - began
        return Pace(passes, took_s)

    def _pass(self) -> None:
        for _ in range(_STEPS):
            self._now += 1
            self._take(self._names[self._now * 31 % _THINGS])
            if len(self._taken) > _STEPS:
                self._give_back(self._taken.popleft())
        self._victims(20)

    def _take(self, name: str) -> None:
        thing = self._things[name]
        thing.holders[self._now] = None
        thing.used = self._now
        self._idle.pop(name, None)
        self._taken.append(_Taken(self._now, thing, self._now))

    def _give_back(self, taken: _Taken) -> None:
        thing = taken.thing
        del thing.holders[taken.holder]
        if not thing.holders:
            self._idle[thing.name] = None

    def _victims(self, size: int) -> list[_Item]:
        chosen, found = [], 0
        for name in self._idle:
            thing = self._things[name]
            chosen.append(thing)
            found += thing.size
            if found >= size:
                break
        return sorted(chosen, key=_size)


def _size(thing: _Item) -> int:
    return thing.size
