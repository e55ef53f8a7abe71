"""Whether a lease is kept when its holder has done with it for now: every rule of giving way.

A loop gives back and asks again at once; a request is several calls; a stage makes steps for
requests that are in flight. Each keeps what it will need again, and none keeps it for long from
those that wait. Pure: no clock, no thread, no socket; times are seconds on the caller's clock. Not
thread-safe.

What a loop keeps, the daemon has not heard the release of. It costs others little: while anybody
waits for memory a lease is kept for LINGER_S at most (on a GPU, from when the work under it is
done: until then nobody else could have had it), and not at all if what it holds is wanted. While
nobody waits it is nobody's loss, and it is given back SWEEP_S later, or twice that: a timer set at
each release is more than all the rest of it costs.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import Protocol

from swapd_client.leases.book import Record
from swapd_client.session.processor import Work

#: Longer than what lies between two steps of a loop, shorter than any copy worth waiting for.
LINGER_S = 0.002
#: How often the time at which what is kept ends may be set, while nobody waits.
SWEEP_S = 0.25
#: Who gives back while the GPU is still at it, and comes back within this, comes back at once.
WORK_S = 0.1
#: A thread that asks again within this finds out itself if the GPU has done its work of before.
#: Longer than most steps are: to look in vain whether a thread is late costs that thread most.
BACK_S = 0.005
#: A loop asks the daemon so often all the same: it may be stopping, or have better to do.
UNTOLD_S = 1.0

#: The thread that took the lease, and what it asked for.
Key = tuple[int, tuple[str, ...]]


class Told(Protocol):
    """What the daemon has told this process. It may change at any time."""

    #: Names that others wait for, and are to have now.
    wanted: set[str]
    #: Whether anybody waits for what leases may hold.
    hurried: bool


class _Loop:
    """What one thread gives back and asks for again."""

    __slots__ = ("kept", "names", "returns", "since", "until")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        #: What the daemon still counts as held, and since when it is kept.
        self.kept: Record | None = None
        self.since = 0.0
        #: Until when a return is one at once; past if its thread asked the daemon for anything.
        self.until = -inf
        #: Whether it came back at once the last time.
        self.returns = False

    def has_any(self, names: Collection[str]) -> bool:
        """Whether what is kept is one of these."""
        kept = self.kept
        return kept is not None and not set(kept.granted.names or self.names).isdisjoint(names)


class LoopKeeping:
    """What the loops of one client keep. Who came back at once is trusted to do so again.

    `take` and `keep` are what a step of a loop costs: they look up as little as they can.
    """

    def __init__(self, told: Told) -> None:
        self._told = told
        self._loops: dict[int, dict[tuple[str, ...], _Loop]] = {}
        #: Those of which a lease is kept.
        self._kept: set[_Loop] = set()
        #: When `woken` is to be called, at the latest; inf if nothing is kept.
        self.wakes = inf
        #: Whether that is for just then, and is not set later.
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
        """`key` gives back: whether its lease is kept. If not, the daemon is to be told now."""
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
        # now that it is kept, whoever is told of those that wait sees it: so not before
        if record.transient or self._told.hurried or self._told.wanted:
            if now + LINGER_S < self.wakes:
                self.wakes, self._exact = now + LINGER_S, True
        elif self.wakes is inf:
            self.wakes, self._exact = now + 2 * SWEEP_S, False
        elif self.wakes < now + SWEEP_S and not self._exact:
            # later only for this loop's own, not for what another has left
            self.wakes = max(self.wakes, self._oldest() + 2 * SWEEP_S)
        return True

    def of(self, thread: int) -> list[Record]:
        """What a thread kept: to be given back before it asks for anything else."""
        loops = self._loops.pop(thread, None)
        if loops is None:
            return []
        ended = self._end([loop for loop in loops.values() if loop.kept is not None])
        for loop in loops.values():
            loop.until = -inf
        trusted = {names: loop for names, loop in loops.items() if loop.returns}
        if trusted:  # and held now, or asked for first of all the next time
            self._loops[thread] = trusted
        return ended

    def all(self) -> list[Record]:
        """All that is kept is to be given back."""
        return self._pop(list(self._kept))

    def woken(self, now: float) -> list[Record]:
        """What is to be given back now: what others want, and what was kept long enough in vain."""
        ended = self._pop([loop for loop in self._kept if loop.has_any(self._told.wanted)])
        ended += self._end(self._late(now))
        self.wakes, self._exact = (self._oldest() + LINGER_S, True) if self._kept else (inf, False)
        return ended

    def _late(self, now: float) -> list[_Loop]:
        """Since the GPU was done with it, if it was at it."""
        late = []
        for loop in [loop for loop in self._kept if now - loop.since >= LINGER_S]:
            assert loop.kept is not None
            if loop.kept.work is not None and loop.kept.work.is_pending():
                loop.since = now
            else:
                late.append(loop)
        return late

    def _oldest(self) -> float:
        """Since when the first of those that are kept is; there must be one."""
        return min(loop.since for loop in self._kept)

    def _end(self, loops: Collection[_Loop]) -> list[Record]:
        """They did not come back."""
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
    """Ends a lease whose work is done. `here(record)` tells the daemon, if the caller would."""

    def __call__(self, here: Callable[[Record], None] | None = None) -> None: ...


class WorkKeeping:
    """Which leases, given back while the GPU is still at it, their own threads look after.

    A thread that asks again at once finds the work of before done, or finds it so the next time:
    then nobody has to wake up to wait for it. It is waited for, by another thread, if that one does
    not come back, did not the last time, or if anybody waits for memory.
    """

    def __init__(self, told: Told) -> None:
        self._told = told
        #: By thread, since when.
        self._kept: dict[int, deque[tuple[float, Work, End]]] = {}
        #: Until when a return is one at once; and whose last one was.
        self._until: dict[int, float] = {}
        self._returning: set[int] = set()
        #: When `woken` is to be called, at the latest; inf if nothing is kept.
        self.wakes = inf

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, thread: int, work: Work, end: End, now: float) -> bool:
        """A thread gives back: whether it looks after that. If not, it is to be waited for now."""
        self._until[thread] = now + BACK_S
        if thread not in self._returning:
            return False
        kept, one = self._kept.setdefault(thread, deque()), (now, work, end)
        kept.append(one)
        # now that it is kept, whoever is told of those that wait sees it: so not before
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
        """A thread asks again: what of its own is done, for itself to end first."""
        until = self._until.pop(thread, inf)
        if until < now:
            self._returning.discard(thread)
        elif until is not inf:  # else nothing was to be waited for the last time
            self._returning.add(thread)
        kept, done = self._kept.get(thread), []
        while kept and kept[0][1].is_over():
            done.append(kept.popleft()[2])
        self._forget_if_empty(thread)
        return done

    def of(self, thread: int) -> list[tuple[Work, End]]:
        """It asks for something else: all of its own is to be waited for."""
        return [(work, end) for _, work, end in self._kept.pop(thread, ())]

    def woken(self, now: float) -> list[tuple[Work, End]]:
        """What is to be waited for now: what was kept in vain, or all if anybody waits."""
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
        """All of it is to be waited for."""
        return [one for thread in list(self._kept) for one in self.of(thread)]

    def _forget_if_empty(self, thread: int) -> None:
        if not self._kept.get(thread, True):
            del self._kept[thread]

    def _oldest(self) -> float:
        """Since when the first is kept; there must be one."""
        return min(kept[0][0] for kept in self._kept.values())


class RequestKeeping:
    """Whether a request keeps, from call to call, what one of its calls has brought in."""

    def __init__(self, within_s: float) -> None:
        """`within_s`: how long what others want is still kept."""
        self._within_s = within_s
        #: When what is wanted is given back; None: nothing is.
        self._until: float | None = None

    def keeps(self, now: float, *, wanted: bool) -> bool:
        """Whether what a call held is kept when it ends. `wanted`: somebody waits for it."""
        if not wanted:
            return True
        if self._until is None:
            self._until = now + self._within_s
        if now < self._until:
            return True
        self._until = None
        return False

    def over(self) -> None:
        """All of it was given back."""
        self._until = None


class StageKeeping:
    """Whether a stage keeps its lease from step to step.

    While nobody wants it, as long as requests are in flight. One whose lease is wanted (the daemon
    says so when the stage has had its quantum) finishes what is in flight by then, within a bound,
    and no request that came later; or, with a time slice, whatever is in flight until its turn has
    lasted so long. A step that had nothing to compute gives way at once. So does one that has made
    enough for those that wait, if these go on with what it makes.
    """

    def __init__(self, finish_within_s: float, slice_s: float | None = None) -> None:
        """`finish_within_s`: how long what is in flight may take when somebody waits. `slice_s`:
        how long a turn lasts then, instead."""
        self._finish_within_s = finish_within_s
        self._slice_s = slice_s
        #: When the turn began.
        self._since = 0.0
        #: Requests that were scheduled and have not finished.
        self.in_flight: set[str] = set()
        #: How many finished since the stage gave way last.
        self.finished = 0
        #: Whether it never gives way while any request is in flight, however long others wait.
        self.whole = False
        #: Whether it keeps its lease between requests, too, until somebody wants it.
        self.stays = False
        #: What is to finish before the stage gives way, and by when. None: nobody waits.
        self._asked: tuple[frozenset[str], float] | None = None

    def note(self, came: Iterable[str], went: Iterable[str]) -> None:
        """Requests that are scheduled for the first time, and those that ended."""
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

        `wanted`: somebody waits for it, and is to have it. `computed`: the last step did something.
        `enough`: who waits goes on with what was made in this turn, and that is enough for a while.
        `beside`: who waits has room beside this stage, once others give way; in a bounded time.
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
        """It gave way: how many requests finished before."""
        self._asked = None
        finished, self.finished = self.finished, 0
        return finished
