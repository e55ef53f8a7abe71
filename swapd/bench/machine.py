"""Whether the machine was quiet while a figure was measured: else nobody can judge the figure.

Before and after each measurement the plain loop of `pace.py` runs alone, and shows how fast the
machine is and whether its thread has to wait for a CPU. Of the time between, the kernel says how
much the CPUs did that was not ours, and how much the hypervisor kept. What the kernel does not say
(another kernel, a container) is named, and the rest is still looked at.
"""

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from swapd.bench.pace import Loop

Measured = TypeVar("Measured")

#: A probe is the quietest of some slices: what our own last measurement leaves ends in the first.
SLICES = 3
SLICE_S = 0.02
#: Of the time of a probe, most that its thread may wait for a CPU.
WAITED_MAX = 0.1
#: Of the time in which CPUs have work, most that the hypervisor may give to others.
STEAL_MAX = 0.02
#: What others may use, in CPUs, where fewer than NEEDED_CPUS are left: a worker's and the daemon's.
OTHERS_MAX_CPUS = 0.25
NEEDED_CPUS = 2
#: How many times as long as at best the plain loop may take.
SLOWER_MAX = 1.5
#: The kernel's counts are believed if they are of so much of the time that went by.
_COUNTED_MIN = 0.5
#: A clock of CPU time that goes in longer steps says nothing of what is measured here.
STEP_MAX_S = 1e-3
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: What is not known without it.
_OF_STAT = "steal time, and what other processes use of the CPUs"


class Conditions(msgspec.Struct, frozen=True):
    """What a measurement had of the machine. None: not known here."""

    #: Microseconds a pass of the plain loop, before it or after it: the slower.
    loop_us: float
    #: Of the time of that loop, the share in which it waited for a CPU.
    waited: float | None
    #: CPUs that other processes, and the kernel for them, kept busy meanwhile.
    others_cpus: float | None = None
    #: Of the time in which CPUs had work, the share that the hypervisor gave to others.
    steal: float | None = None


class Surroundings(msgspec.Struct, frozen=True):
    """The machine in one run. `loop_us` is the plain loop's best."""

    cpus: int
    loop_us: float
    conditions: dict[str, Conditions]
    #: What the kernel does not say here.
    not_probed: list[str]


class CpuTimes(NamedTuple):
    """Seconds of all CPUs that this process may use, since the machine's start."""

    cpus: int
    counted_s: float
    idle_s: float
    #: None where the kernel has no such count.
    steal_s: float | None

    def since(self, before: "CpuTimes") -> "CpuTimes":
        steal_s = None
        if self.steal_s is not None and before.steal_s is not None:
            steal_s = self.steal_s - before.steal_s
        return CpuTimes(
            self.cpus, self.counted_s - before.counted_s, self.idle_s - before.idle_s, steal_s
        )


class Machine:
    """Watches one run. Not thread-safe: nothing else of this process may run while it probes."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._loop = Loop()
        self._cpus = os.sched_getaffinity(0)
        self._best_us = float("inf")
        #: The probe after the last measurement is the one before the next.
        self._last: Conditions | None = None
        self._conditions: dict[str, Conditions] = {}
        self._not_probed: dict[str, None] = {}
        self._step_s = clock_step_s()
        if self._step_s > STEP_MAX_S:
            self._not_probed[f"waiting for a CPU: CPU time has steps of {self._step_s:g} s"] = None
        self._loop.run(SLICE_S)  # the interpreter learns it

    def watch(self, name: str, measure: Callable[[], Measured]) -> Measured:
        """What `measure` returns. The processes that it starts must have ended by then."""
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
        """CPUs that others used, and the share of steal."""
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
    """The counts of `cpus` in what /proc/stat says. Raises: ValueError if they are not there."""
    ticks = {}
    for line in stat.splitlines():
        name, *counts = line.split()
        if name.startswith("cpu") and name[3:].isdigit():
            ticks[int(name[3:])] = [int(count) for count in counts]
    rows = [ticks[cpu] for cpu in cpus if cpu in ticks]
    if len(rows) < len(cpus) or not all(len(row) > _IDLE for row in rows):
        raise ValueError("lacks the times of the CPUs that this process may use")
    known = all(len(row) > _STEAL for row in rows)
    return CpuTimes(
        cpus=len(rows),
        counted_s=sum(sum(row[: _STEAL + 1]) for row in rows) / _TICKS_PER_S,
        idle_s=sum(sum(row[_IDLE : _IO_WAIT + 1]) for row in rows) / _TICKS_PER_S,
        steal_s=sum(row[_STEAL] for row in rows) / _TICKS_PER_S if known else None,
    )


#: Where a count stands in its line; those after steal are parts of others.
_IDLE, _IO_WAIT, _STEAL = 3, 4, 7


def too_busy(found: Conditions, surroundings: Surroundings) -> str:
    """Why nothing can be judged that was measured then; "" if it can."""
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
    """By how much the clock of a thread's CPU time goes on, at the least."""
    began = time.thread_time()
    while (now := time.thread_time()) == began:
        pass
    return now - began


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _own_s() -> float:
    """CPU seconds of this process, and of those of its children that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
