"""The speed of plain Python on this machine just now: a loop of work like the core's.

It makes and drops small objects, and uses attributes, dicts, small functions and short sorts. It
runs between the measurements, for about as long, so a slow machine slows both. Bounds in
microseconds count passes of it.
"""

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

#: Microseconds of a pass on the CPU on which the bounds in microseconds were set.
REFERENCE_US = 7.3

_THINGS = 600
_STEPS = 12
#: Passes between two looks at the clock, each of which is a system call.
_BETWEEN_LOOKS = 16


class _Thing:
    __slots__ = ("holders", "name", "size", "used")

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.used = 0
        self.holders: dict[int, None] = {}


class _Taken(NamedTuple):
    time: int
    thing: _Thing
    holder: int


class Pace(NamedTuple):
    """Some passes of the loop, at least one."""

    passes: int
    #: CPU time, which does not include waits on a busy machine.
    seconds: float

    @property
    def us(self) -> float:
        """Mean microseconds of CPU time a pass."""
        return self.seconds / self.passes * 1e6


def total(paces: Iterable[Pace]) -> Pace:
    """The sum of all, at least one."""
    passes, seconds = zip(*paces, strict=True)
    return Pace(sum(passes), sum(seconds))


class Loop:
    """Takes things in turn, looks at them, and gives them back."""

    def __init__(self) -> None:
        self._things = {f"thing-{i}": _Thing(f"thing-{i}", i * 7 % 13 + 1) for i in range(_THINGS)}
        self._names = list(self._things)
        self._idle = dict.fromkeys(self._names)
        self._taken: deque[_Taken] = deque()
        self._now = 0

    def run(self, for_s: float) -> Pace:
        """Run for about `for_s` seconds of CPU time, at least one pass."""
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

    def _victims(self, size: int) -> list[_Thing]:
        chosen, found = [], 0
        for name in self._idle:
            thing = self._things[name]
            chosen.append(thing)
            found += thing.size
            if found >= size:
                break
        return sorted(chosen, key=_size)


def _size(thing: _Thing) -> int:
    return thing.size
