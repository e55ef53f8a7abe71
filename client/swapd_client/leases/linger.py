"""Leases that were given back a moment ago, kept for who comes back at once.

A decode loop that acquires and releases at every step would pay a round trip for each. Who
came back quickly last time is trusted to do so again: its lease is kept here for LINGER_S
before the daemon is told, and handed out again without a message. Pure: no clock, no thread,
no socket. Not thread-safe.

What this costs others is bounded: while anybody waits for memory a lease is kept for LINGER_S at
most (on a GPU, from when the work under it is done: until then nobody else could have had it), and
not at all if what it holds is wanted. While nobody waits it is nobody's loss, and it is given back
SWEEP_S later, or twice that: a timer set at each release is more than all the rest of it costs.
"""

from collections.abc import Collection
from math import inf
from typing import NamedTuple, Protocol

from swapd.shared.protocol import Granted

#: Longer than what lies between two steps of a loop, shorter than any copy worth waiting for.
LINGER_S = 0.002
#: How often the time at which what is kept ends may be set, while nobody waits.
SWEEP_S = 0.25
#: Who gives back while the GPU is still at it, and comes back within this, comes back at once.
WORK_S = 0.1
#: A loop asks the daemon so often all the same: it may be stopping, or have better to do.
UNTOLD_S = 1.0


class Work(Protocol):
    """What the GPU was asked to do under a lease."""

    def is_pending(self) -> bool:
        """Whether it is still at it. Does not block."""


class Held(NamedTuple):
    """A lease, and the streams of a GPU whose work under it must be done before it ends."""

    granted: Granted
    streams: tuple[int, ...] = ()
    #: What was not done when it was given back.
    work: Work | None = None
    #: Whether it may stay held for a moment after its release.
    may_linger: bool = False
    #: Whether some of it leaves the device with it.
    passes: bool = False


#: The thread that took the lease, and what it asked for.
Key = tuple[int, tuple[str, ...]]


class _Loop:
    """What one thread gives back and asks for again."""

    __slots__ = ("held", "names", "returns", "since", "until")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        #: What the daemon still counts as held, and since when it is kept.
        self.held: Held | None = None
        self.since = 0.0
        #: Until when a return is one at once; past if its thread asked the daemon for anything.
        self.until = -inf
        #: Whether it came back at once the last time.
        self.returns = False

    def holds(self, names: Collection[str]) -> bool:
        """Whether what is kept is one of these."""
        held = self.held
        return held is not None and not set(held.granted.names or self.names).isdisjoint(names)


class Linger:
    """The leases of one client that linger. Times are seconds on the caller's clock.

    `take` and `keep` are what a step of a loop costs: they look up as little as they can.
    """

    def __init__(self) -> None:
        self._loops: dict[int, dict[tuple[str, ...], _Loop]] = {}
        #: Those of which a lease is kept.
        self._kept: set[_Loop] = set()
        #: Handed out again, by the lease's id: how often.
        self._again: dict[int, int] = {}
        #: Since when the daemon has not heard of a lease, by its id.
        self._untold: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def take(self, key: Key, now: float) -> Held | None:
        """`key` asks again: its kept lease, which is then held again; or None."""
        loops = self._loops.get(key[0])
        loop = loops.get(key[1]) if loops is not None else None
        if loop is None:
            return None
        loop.returns = now <= loop.until
        loop.until = -inf
        held = loop.held
        if held is None:
            return None
        loop.held = None
        self._kept.remove(loop)
        lease = held.granted.id
        self._again[lease] = self._again.get(lease, 0) + 1
        return held

    def keep(self, key: Key, held: Held, now: float) -> bool:
        """`key` gives back: whether its lease is kept. If not, the daemon is to be told now."""
        loops = self._loops.get(key[0])
        if loops is None:
            loops = self._loops[key[0]] = {}
        loop = loops.get(key[1])
        if loop is None:
            loop = loops[key[1]] = _Loop(key[1])
        loop.until = now + (LINGER_S if held.work is None else WORK_S)
        if not loop.returns or loop.held is not None:
            return False
        if now - self._untold.setdefault(held.granted.id, now) > UNTOLD_S:
            return False
        loop.held, loop.since = held, now
        self._kept.add(loop)
        return True

    def again(self, granted: Granted) -> int:
        """How often a lease that now ends was handed out without a message."""
        self._untold.pop(granted.id, None)
        return self._again.pop(granted.id, 0)

    def of(self, thread: int) -> list[Held]:
        """What a thread kept: to be given back before it asks for anything else."""
        loops = self._loops.pop(thread, None)
        if loops is None:
            return []
        held = self._end([loop for loop in loops.values() if loop.held is not None])
        for loop in loops.values():
            loop.until = -inf
        trusted = {names: loop for names, loop in loops.items() if loop.returns}
        if trusted:  # and held now, or asked for first of all the next time
            self._loops[thread] = trusted
        return held

    def with_names(self, names: Collection[str]) -> list[Held]:
        """What is kept and wanted by others."""
        return self._pop([loop for loop in self._kept if loop.holds(names)])

    def all(self) -> list[Held]:
        return self._pop(list(self._kept))

    def due(self, now: float) -> list[Held]:
        """What was kept long enough, in vain: since the GPU was done with it, if it was at it."""
        late = [loop for loop in self._kept if now - loop.since >= LINGER_S]
        for loop in list(late):
            assert loop.held is not None
            if loop.held.work is not None and loop.held.work.is_pending():
                loop.since = now
                late.remove(loop)
        return self._end(late)

    @property
    def oldest(self) -> float:
        """Since when the first of those that are kept is; there must be one."""
        return min(loop.since for loop in self._kept)

    def _end(self, loops: Collection[_Loop]) -> list[Held]:
        """They did not come back."""
        for loop in loops:
            loop.returns = False
        return self._pop(loops)

    def _pop(self, loops: Collection[_Loop]) -> list[Held]:
        self._kept.difference_update(loops)
        ended = [loop.held for loop in loops if loop.held is not None]
        for loop in loops:
            loop.held = None
        return ended
