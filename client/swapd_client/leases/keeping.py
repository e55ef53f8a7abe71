"""Whether a lease is kept after its holder has given it back: all rules of giving way.

A loop gives back and asks again at once; a request is several calls; a stage makes steps for
requests in flight. Each keeps the leases that it will need again, but not for long if others wait.
Pure: no clock, thread or socket; times are seconds on the caller's clock. Not thread-safe.

The daemon does not know that a kept lease was released. This costs others little. While any acquire
waits for memory, a lease is kept for LINGER_S at most, counted on a GPU from the end of the work
under it; if an acquire waits for its components, it is not kept at all. Otherwise it costs nothing,
and is given back after one or two SWEEP_S: setting a timer at each release would cost more than all
the rest of the release.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import Protocol

from swapd_client.leases.book import Record
from swapd_client.session.processor import Work

#: Longer than the time between two steps of a loop, shorter than any copy worth waiting for.
LINGER_S = 0.002
#: Least time between two settings of the alarm, while no acquire waits.
SWEEP_S = 0.25
#: A thread that gave back before its GPU work was done returns at once if it returns within this.
WORK_S = 0.1
#: A thread that asks again within this checks its own GPU work. Longer than most steps: checking in
#: vain whether a thread is late costs that thread most.
BACK_S = 0.005
#: Even a loop asks the daemon this often: the daemon may be stopping, or have a better plan.
UNTOLD_S = 1.0

#: The thread that took the lease, and the names it asked for.
Key = tuple[int, tuple[str, ...]]


class Told(Protocol):
    """The daemon's messages to this process. They may change at any time."""

    #: Names that others wait for, and may have now.
    wanted: set[str]
    #: Whether any acquire waits for memory that leases may hold.
    hurried: bool


class _Loop:
    """The components that one thread gives back and asks for again."""

    __slots__ = ("kept", "names", "returns", "since", "until")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        #: The lease that the daemon still counts as held, and the time since which it is kept.
        self.kept: Record | None = None
        self.since = 0.0
        #: Latest time of a return at once; in the past if its thread sent any other request.
        self.until = -inf
        #: Whether its last return was at once.
        self.returns = False

    def has_any(self, names: Collection[str]) -> bool:
        """Whether the kept lease has one of these."""
        kept = self.kept
        return kept is not None and not set(kept.granted.names or self.names).isdisjoint(names)


class LoopKeeping:
    """The kept leases of one client's loops. A loop that returned at once is expected to do so
    again.

    `take` and `keep` are the cost of a loop's step, so they look up as little as they can.
    """

    def __init__(self, told: Told) -> None:
        self._told = told
        self._loops: dict[int, dict[tuple[str, ...], _Loop]] = {}
        #: Loops with a kept lease.
        self._kept: set[_Loop] = set()
        #: Latest time to call `woken`; inf if nothing is kept.
        self.wakes = inf
        #: Whether that time is exact, and must not be moved later.
        self._exact = False

    def __bool__(self) -> bool:
        return bool(self._kept)

    def take(self, key: Key, now: float) -> Record | None:
        """`key` asks again: its kept lease, which is then held again; or None."""
        loops = self._loops.get(key[0])
        loop = loops.get(key[1]) if loops is not None else None
        if loop is None:
            return None
        loop.returns = now <= loop.until
        loop.until = -inf
        kept = loop.kept
        if kept is None:
            return None
        loop.kept = None
        self._kept.remove(loop)
        kept.again += 1
        return kept

    def keep(self, key: Key, record: Record, now: float) -> bool:
        """`key` gives back: whether its lease is kept. If not, the daemon must be told now."""
        wanted = self._told.wanted
        if wanted and not wanted.isdisjoint(record.granted.names or key[1]):
            return False
        loops = self._loops.get(key[0])
        if loops is None:
            loops = self._loops[key[0]] = {}
        loop = loops.get(key[1])
        if loop is None:
            loop = loops[key[1]] = _Loop(key[1])
        loop.until = now + (LINGER_S if record.work is None else WORK_S)
        if not loop.returns or loop.kept is not None:
            return False
        if record.untold_since is None:
            record.untold_since = now
        elif now - record.untold_since > UNTOLD_S:
            return False
        loop.kept, loop.since = record, now
        self._kept.add(loop)
        # after the lease is kept: a message about waiters that comes from now on will see it
        if record.transient or self._told.hurried or self._told.wanted:
            if now + LINGER_S < self.wakes:
                self.wakes, self._exact = now + LINGER_S, True
        elif self.wakes is inf:
            self.wakes, self._exact = now + 2 * SWEEP_S, False
        elif self.wakes < now + SWEEP_S and not self._exact:
            # only for this loop's own lease, not for one that another loop has left
            self.wakes = max(self.wakes, self._oldest() + 2 * SWEEP_S)
        return True

    def of(self, thread: int) -> list[Record]:
        """The leases that a thread keeps, to be given back before its next request."""
        loops = self._loops.pop(thread, None)
        if loops is None:
            return []
        ended = self._end([loop for loop in loops.values() if loop.kept is not None])
        for loop in loops.values():
            loop.until = -inf
        trusted = {names: loop for names, loop in loops.items() if loop.returns}
        if trusted:  # held now, or first in its thread's next round
            self._loops[thread] = trusted
        return ended

    def all(self) -> list[Record]:
        """All kept leases, to be given back."""
        return self._pop(list(self._kept))

    def woken(self, now: float) -> list[Record]:
        """The leases to give back now: those that others want, and those kept long enough in
        vain."""
        ended = self._pop([loop for loop in self._kept if loop.has_any(self._told.wanted)])
        ended += self._end(self._late(now))
        self.wakes, self._exact = (self._oldest() + LINGER_S, True) if self._kept else (inf, False)
        return ended

    def _late(self, now: float) -> list[_Loop]:
        """Loops kept for LINGER_S, counted from the end of their GPU work."""
        late = []
        for loop in [loop for loop in self._kept if now - loop.since >= LINGER_S]:
            assert loop.kept is not None
            if loop.kept.work is not None and loop.kept.work.is_pending():
                loop.since = now
            else:
                late.append(loop)
        return late

    def _oldest(self) -> float:
        """Time of the oldest kept lease; there must be one."""
        return min(loop.since for loop in self._kept)

    def _end(self, loops: Collection[_Loop]) -> list[Record]:
        """These loops did not return."""
        for loop in loops:
            loop.returns = False
        return self._pop(loops)

    def _pop(self, loops: Collection[_Loop]) -> list[Record]:
        self._kept.difference_update(loops)
        ended = [loop.kept for loop in loops if loop.kept is not None]
        for loop in loops:
            loop.kept = None
        return ended


class End(Protocol):
    """Ends a lease whose GPU work is done. `here(record)` tells the daemon from the caller's
    thread.
    """

    def __call__(self, here: Callable[[Record], None] | None = None) -> None: ...


class WorkKeeping:
    """Which leases, given back before their GPU work is done, their own threads end.

    A thread that asks again at once finds its earlier work done, or finds so the next time: then no
    other thread has to wake up and wait. Another thread waits for the work if this thread does not
    return, did not return the last time, or if any acquire waits for memory.
    """

    def __init__(self, told: Told) -> None:
        self._told = told
        #: By thread: time, work and end of each lease.
        self._kept: dict[int, deque[tuple[float, Work, End]]] = {}
        #: Latest time of a return at once, by thread; and the threads whose last return was at
        #: once.
        self._until: dict[int, float] = {}
        self._returning: set[int] = set()
        #: Latest time to call `woken`; inf if nothing is kept.
        self.wakes = inf

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, thread: int, work: Work, end: End, now: float) -> bool:
        """A thread gives back: whether it ends the lease itself. If not, a thread must wait for it
        now.
        """
        self._until[thread] = now + BACK_S
        if thread not in self._returning:
            return False
        kept, one = self._kept.setdefault(thread, deque()), (now, work, end)
        kept.append(one)
        # after the lease is kept: a message about waiters that comes from now on will see it
        if self._told.hurried or self._told.wanted:
            kept.remove(one)
            self._forget_if_empty(thread)
            return False
        if self.wakes is inf:
            self.wakes = now + 2 * BACK_S
        elif self.wakes < now + BACK_S:
            self.wakes = max(self.wakes, self._oldest() + 2 * BACK_S)
        return True

    def returned(self, thread: int, now: float) -> list[End]:
        """A thread asks again: the ends of its own leases whose work is done."""
        until = self._until.pop(thread, inf)
        if until < now:
            self._returning.discard(thread)
        elif until is not inf:  # else it had nothing to wait for the last time
            self._returning.add(thread)
        kept, done = self._kept.get(thread), []
        while kept and kept[0][1].is_over():
            done.append(kept.popleft()[2])
        self._forget_if_empty(thread)
        return done

    def of(self, thread: int) -> list[tuple[Work, End]]:
        """A thread sends another request: all its work, for another thread to wait for."""
        return [(work, end) for _, work, end in self._kept.pop(thread, ())]

    def woken(self, now: float) -> list[tuple[Work, End]]:
        """Work to wait for now: of leases kept in vain, or all if any acquire waits."""
        waits = self._told.hurried or self._told.wanted
        late = []
        for thread, kept in list(self._kept.items()):
            while kept and (waits or now - kept[0][0] >= BACK_S):
                late.append(kept.popleft()[1:])
                self._returning.discard(thread)
            self._forget_if_empty(thread)
        self.wakes = self._oldest() + 2 * BACK_S if self._kept else inf
        return late

    def all(self) -> list[tuple[Work, End]]:
        """All work, for another thread to wait for."""
        return [one for thread in list(self._kept) for one in self.of(thread)]

    def _forget_if_empty(self, thread: int) -> None:
        if not self._kept.get(thread, True):
            del self._kept[thread]

    def _oldest(self) -> float:
        """Time of the oldest kept lease; there must be one."""
        return min(kept[0][0] for kept in self._kept.values())


class RequestKeeping:
    """Whether a request keeps the components that one of its calls loaded, for its next call."""

    def __init__(self, within_s: float) -> None:
        """`within_s`: how long components that others want are still kept."""
        self._within_s = within_s
        #: Time at which wanted components are given back; None: none are wanted.
        self._until: float | None = None

    def keeps(self, now: float, *, wanted: bool) -> bool:
        """Whether a call's components are kept at its end. `wanted`: an acquire waits for them."""
        if not wanted:
            return True
        if self._until is None:
            self._until = now + self._within_s
        if now < self._until:
            return True
        self._until = None
        return False

    def over(self) -> None:
        """All components were given back."""
        self._until = None


class StageKeeping:
    """Whether a stage keeps its lease from step to step.

    While no acquire waits for it: as long as requests are in flight. Once the lease is wanted (the
    daemon reports that after the minimum residency), the stage finishes the requests in flight at
    that time, within a bound, and no later ones. With a time slice, it instead serves any requests
    until its turn has lasted that long. It gives way at once after a step without anything to
    compute, and after it has made enough output for a waiting stage that consumes that output.
    """

    def __init__(self, finish_within_s: float, slice_s: float | None = None) -> None:
        """`finish_within_s`: bound on finishing the requests in flight while others wait.
        `slice_s`: length of a turn while others wait, instead.
        """
        self._finish_within_s = finish_within_s
        self._slice_s = slice_s
        #: Time at which the turn began.
        self._since = 0.0
        #: Requests that were scheduled and have not finished.
        self.in_flight: set[str] = set()
        #: Number of requests finished since the stage last gave way.
        self.finished = 0
        #: Whether it never gives way while any request is in flight, however long others wait.
        self.whole = False
        #: Whether it also keeps its lease between requests, until it is wanted.
        self.stays = False
        #: Requests to finish before the stage gives way, and by when. None: no stage waits.
        self._asked: tuple[frozenset[str], float] | None = None

    def note(self, came: Iterable[str], went: Iterable[str]) -> None:
        """Note requests scheduled for the first time, and requests that ended."""
        for one in went:
            if one in self.in_flight:
                self.in_flight.remove(one)
                self.finished += 1
        self.in_flight.update(came)

    def begin(self, now: float) -> None:
        """The stage has the lease from now on."""
        self._since = now

    def keeps(
        self,
        now: float,
        *,
        wanted: bool,
        computed: bool = True,
        enough: bool = False,
        beside: bool = False,
    ) -> bool:
        """Whether the lease is kept, asked between two steps.

        `wanted`: an acquire waits for it and may have it. `computed`: the last step computed
        something. `enough`: the waiting stage consumes this turn's output, and has enough for a
        while. `beside`: the waiting stage fits beside this one once others give way, in a bounded
        time.
        """
        if not wanted or self.whole:
            self._asked = None
            return bool(self.in_flight) or (self.stays and not wanted)
        if beside:
            if self._asked is None:
                self._asked = frozenset(self.in_flight), now + self._finish_within_s
            return now < self._asked[1]
        if self._slice_s is not None:
            lasts = now < self._since + self._slice_s
            return computed and lasts and bool(self.in_flight) and not enough
        if self._asked is None:
            self._asked = frozenset(self.in_flight), now + self._finish_within_s
        to_finish, until = self._asked
        within = computed and not enough and now < until
        return within and not to_finish.isdisjoint(self.in_flight)

    def over(self) -> int:
        """The stage gave way; return the number of requests finished in the turn."""
        self._asked = None
        finished, self.finished = self.finished, 0
        return finished
