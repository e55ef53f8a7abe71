"""Leases that were given back a moment ago, kept for who comes back at once.

A decode loop that acquires and releases at every step would pay a round trip for each. Who
came back quickly last time is trusted to do so again: its lease is kept here for LINGER_S
before the daemon is told, and handed out again without a message. Pure: no clock, no thread,
no socket. Not thread-safe.

What this costs others is bounded: while anybody waits for memory a lease is kept for LINGER_S at
most (on a GPU, from when the work under it is done: until then nobody else could have had it), and
not at all if what it holds is wanted. While nobody waits it is nobody's loss, and what is kept is
looked through every SWEEP_S: a timer set at each release is more than all the rest of it costs.
"""

from collections.abc import Collection
from typing import NamedTuple, Protocol

from swapd.protocol import Granted

#: Longer than what lies between two steps of a loop, shorter than any copy worth waiting for.
LINGER_S = 0.002
#: How often what is kept is looked through while nobody waits.
SWEEP_S = 0.1
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


class Linger:
    """The leases of one client that linger. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        #: What the daemon still counts as held, and since when it is kept.
        self._kept: dict[Key, tuple[Held, float]] = {}
        #: By thread: what it gave back since it last asked the daemon for anything, and until
        #: when a return is one at once.
        self._gave: dict[int, dict[tuple[str, ...], float]] = {}
        #: Those that came back within LINGER_S the last time, and asked for nothing in between.
        self._returns: set[Key] = set()
        #: Handed out again, by the lease's id: how often.
        self._again: dict[int, int] = {}
        #: Since when the daemon has not heard of a lease, by its id.
        self._untold: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._kept)

    def take(self, key: Key, now: float) -> Held | None:
        """`key` asks again: its kept lease, which is then held again; or None."""
        until = self._gave.get(key[0], {}).pop(key[1], None)
        if until is None or now > until:
            self._returns.discard(key)
        else:
            self._returns.add(key)
        kept = self._kept.pop(key, None)
        if kept is None:
            return None
        held, _ = kept
        self._again[held.granted.id] = self._again.get(held.granted.id, 0) + 1
        return held

    def keep(self, key: Key, held: Held, now: float) -> bool:
        """`key` gives back: whether its lease is kept. If not, the daemon is to be told now."""
        at_once = LINGER_S if held.work is None else WORK_S
        self._gave.setdefault(key[0], {})[key[1]] = now + at_once
        if key not in self._returns or key in self._kept:
            return False
        if now - self._untold.setdefault(held.granted.id, now) > UNTOLD_S:
            return False
        self._kept[key] = held, now
        return True

    def again(self, granted: Granted) -> int:
        """How often a lease that now ends was handed out without a message."""
        self._untold.pop(granted.id, None)
        return self._again.pop(granted.id, 0)

    def of(self, thread: int) -> list[Held]:
        """What a thread kept: to be given back before it asks for anything else."""
        self._gave.pop(thread, None)
        kept = [key for key in self._kept if key[0] == thread]
        self._returns.difference_update(kept)
        return self._pop(kept)

    def with_names(self, names: Collection[str]) -> list[Held]:
        """What is kept and wanted by others."""
        kept = self._kept.items()
        return self._pop(
            [k for k, (h, _) in kept if not set(h.granted.names or k[1]).isdisjoint(names)]
        )

    def all(self) -> list[Held]:
        return self._pop(list(self._kept))

    def due(self, now: float) -> list[Held]:
        """What was kept long enough, in vain: since the GPU was done with it, if it was at it."""
        late = [key for key, (_, since) in self._kept.items() if now - since >= LINGER_S]
        for key in list(late):
            held, _ = self._kept[key]
            if held.work is not None and held.work.is_pending():
                self._kept[key] = held, now
                late.remove(key)
        self._returns.difference_update(late)
        return self._pop(late)

    @property
    def oldest(self) -> float:
        """Since when the first of those that are kept is; there must be one."""
        return min(since for _, since in self._kept.values())

    def _pop(self, keys: list[Key]) -> list[Held]:
        return [self._kept.pop(key)[0] for key in keys]
