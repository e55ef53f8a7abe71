"""Estimates when each waiter will be granted, by usual times, when somebody asks. Pure; changes
nothing.

It plays the queue forward: each waiter, in turn, gets the room that comes free first, and loads
behind the waiters before it.
"""

from collections.abc import Iterator
from itertools import islice
from math import inf
from operator import attrgetter
from typing import NamedTuple

from swapd.core import eviction, explain, twins
from swapd.core.ledger import Ledger
from swapd.core.queue import LOOKED_AT
from swapd.core.records import Component, Waiter
from swapd.core.states import State
from swapd.shared.units import seconds

#: Most leased components that one waiter may count on, those first that give way first.
LEASED_MAX = 64
#: A lease may be held for any time once it is late by this multiple of the usual use, and by the
#: seconds for which a client keeps an unused lease.
LATE, KEPT_S = 4.0, 1.0
#: Assume that a use that should be over lasts this share of the usual time: uses vary.
REST = 1 / 16


class Eta(NamedTuple):
    """Seconds from now; infinite if `unknown`, which says why."""

    seconds: float
    unknown: str = ""

    def plus(self, more_s: float) -> "Eta":
        return self._replace(seconds=self.seconds + more_s)

    @property
    def known_s(self) -> float | None:
        return None if self.unknown else self.seconds

    def __str__(self) -> str:
        return f"in about {seconds(self.seconds)}" if not self.unknown else self.unknown


NOW = Eta(0.0)
PARKED = Eta(inf, "not known: not registered yet")
MANY = Eta(inf, f"not known: more than {LOOKED_AT} wait before it")
BEHIND = Eta(inf, "not known: others wait for memory; a forecast says more")
_NO_ROOM = Eta(inf, "not known: nothing that leaves makes room for it")
_NO_RATE = Eta(inf, "not known yet: nothing was loaded so far")

_first_to_end = attrgetter("seconds")

#: What may leave: when, its chunks, and the component; None for what is leaving already.
MayGo = tuple[Eta, int, Component | None]


def _first_to_go(one: MayGo) -> float:
    return one[0].seconds


def eta(ledger: Ledger, w: Waiter, now: float) -> Eta:
    """Return when `w` is granted. If it is in no queue, it comes last, or first if it needs no
    turn."""
    if w.parked or not ledger.components.keys() >= set(w.names):
        return PARKED
    return next((found for other, found in etas(ledger, now, w) if other is w), MANY)


def etas(ledger: Ledger, now: float, new: Waiter | None = None) -> Iterator[tuple[Waiter, Eta]]:
    """In the order of their turns, without waiters that are far behind."""
    course, queue = _Course(ledger, now), ledger.queue
    first = sorted((w for w in queue if w.admitted), key=attrgetter("order"))
    first += [new] if new is not None and not new.queued else []
    turns = sorted(islice(queue.queued, LOOKED_AT), key=lambda w: w is not queue.head(now))
    if new is not None and len(turns) < LOOKED_AT:
        turns.append(new)
    for w in dict.fromkeys(first + turns):
        yield w, course.grant(w)


def end_of_use(ledger: Ledger, c: Component, now: float) -> Eta:
    """Return when the leases of `c` end. One that the client keeps between uses, which the daemon
    does not see, comes back at the next end of a use after its holder has heard that somebody
    waits."""
    if not c.hold_s:
        return Eta(inf, f"not known yet: {explain.called(c)} is in use for the first time")
    head = ledger.queue.head(now)
    heard = now if head is None or head.head_since is None else head.head_since
    since = max([ledger.leases[key].since for key in c.leases])
    rest_s = min(max(abs(since + c.hold_s - now), REST * c.hold_s), c.hold_s)
    if since + c.hold_s < heard:
        since, rest_s = (heard, c.hold_s / 2) if c.kept_on else (since, 0.0)
    if now - since > (1 + LATE) * c.hold_s + KEPT_S:
        held = f"{', '.join(explain.holders(ledger, c, 3))} for {seconds(now - c.used_since)}"
        usual = f"usually for {seconds(c.hold_s)}"
        return Eta(inf, f"not known: {explain.called(c)} is held by {held}, {usual}")
    return Eta(rest_s)


def _after_use(c: Component, since: Eta) -> Eta:
    if c.hold_s:
        return since.plus(c.hold_s)
    return Eta(inf, f"not known yet: {explain.called(c)} was not used so far")


class _Course:
    def __init__(self, ledger: Ledger, now: float) -> None:
        self._ledger, self._now = ledger, now
        #: Free chunks that earlier waiters leave at this turn, and leave now; chunks that are
        #: leaving.
        self._free = self._free_now = ledger.pool.free
        self._leaving = ledger.leaving
        #: The turn of the next waiter, and the end of all loads so far.
        self._turn = self._lane = NOW
        #: Start and end of the gap before the last load, in which the bus is idle.
        self._gap, self._gap_until = NOW, 0.0
        moving = (m.component for m in ledger.moves.values())
        coming = (c for c in moving if c.state is State.LOADING and not c.workspace)
        #: Loads under way that are not played yet, the most urgent first.
        self._coming = sorted(coming, key=attrgetter("urgency"))
        self._running = self._coming[0] if self._coming else None
        #: When each played load ends.
        self._ends: dict[str, Eta] = {}
        #: When the uses of holders and of waiters end; names that were evicted for waiters and are
        #: out.
        self._held: dict[str, Eta] = {}
        self._used: dict[str, Eta] = {}
        self._gone: set[str] = set()

    def grant(self, w: Waiter) -> Eta:
        asked = self._ledger.named(w.names)
        for c in [c for c in self._coming if c.urgency <= (0, *w.order) or c in asked]:
            self._coming.remove(c)
            self._load(c, NOW)
        absent = [c for c in asked if not self._is_in(c, w)]
        room = self._room(w, asked, absent)
        for c in absent:
            self._load(c, room)
        came = [self._ends[c.name] for c in asked if c.name in self._ends]
        found = max((room, *came), key=_first_to_end)
        self._gone.difference_update(w.names)
        self._used.update((c.name, _after_use(c, found)) for c in asked)
        return found

    # --- room ----------------------------------------------------------------------------

    def _room(self, w: Waiter, asked: list[Component], absent: list[Component]) -> Eta:
        """Return when there is room for the absent components at the turn of `w`. A waiter that
        fits into the free chunks goes before those that need more."""
        turn, short = self._turn if w.queued else NOW, sum([c.chunks for c in absent])
        must = [c for c in (*absent, *self._ledger.rivals(asked)) if self._is_here(c)]
        if not must and short <= min(self._free, self._free_now):
            self._free -= short
            self._free_now -= short
            return NOW if absent else turn
        found = max((turn, *self._make(short, w, asked, must)), key=_first_to_end)
        if w.queued:
            self._turn = found
        return found

    def _make(
        self, short: int, w: Waiter, asked: list[Component], must: list[Component]
    ) -> Iterator[Eta]:
        """Evict `must`, and others until `short` chunks are free; yield when each has left."""
        use_s = eviction.usual_use_s(asked)
        short -= self._free
        for c in must:
            yield self._leaves(c, w, use_s)
            short -= self._go(c)
        for leaves, chunks, goes in sorted(self._may_go(w, short, use_s), key=_first_to_go):
            if short <= 0:
                break
            yield leaves
            short -= chunks if goes is None else self._go(goes)
            self._leaving = self._leaving if goes else 0
        self._free = max(-short, 0)
        if short > 0:
            yield _NO_ROOM

    def _is_here(self, c: Component) -> bool:
        return c.on_device and c.name not in self._gone

    def _go(self, c: Component) -> int:
        self._gone.add(c.name)
        return 0 if c.evicting else c.chunks

    def _may_go(self, w: Waiter, short: int, use_s: float) -> Iterator[MayGo]:
        """Yield no more idle components than are needed."""
        if self._leaving:
            yield self._saved(), self._leaving, None
        ledger, but = self._ledger, {*w.names, *self._gone}
        used = (c for c in ledger.named(self._used) if c.policy != "permanent")
        leased = islice(ledger.holders.to_give_way(), LEASED_MAX)
        for c in dict.fromkeys((*used, *leased)):
            if c.name not in but and c.agents.keys() != {w.owner}:
                yield self._leaves(c, w, use_s), c.chunks, c
        yield from self._idle(w, short, use_s, but.union(self._used))

    def _idle(self, w: Waiter, short: int, use_s: float, but: set[str]) -> Iterator[MayGo]:
        for c in self._ledger.idle:
            if short <= 0:
                return
            if c.name not in but:
                leaves = self._leaves(c, w, use_s)
                short -= 0 if leaves.seconds else c.chunks
                yield leaves, c.chunks, c

    def _leaves(self, c: Component, w: Waiter, use_s: float) -> Eta:
        if c.evicting:
            return self._saved()
        ends, since = self._used.get(c.name), None
        if ends is None and c.leases:
            if c.name not in self._held:
                self._held[c.name] = end_of_use(self._ledger, c, self._now)
            ends = self._held[c.name]
        if ends is not None:
            since = self._now + ends.seconds
        if c.leases and c.kept_on:  # its client will use the lease again
            until = c.resident_since + eviction.quantum_s(self._ledger, c, w.priority, use_s)
        else:
            until = eviction.stays_until(self._ledger, c, w.priority, use_s, since)
        left = max(ends or NOW, Eta(until - self._now), key=_first_to_end)
        return self._copied(left, c.bytes_back)

    def _saved(self) -> Eta:
        out = self._ledger.lane_out
        moves = [m for m in self._ledger.moves.values() if m.lane is out]
        saved = self._copied(NOW, sum([m.component.bytes_back for m in moves]))
        since = max(moves[0].began, out.ended_at) if moves else self._now
        return self._under_way(saved, since)

    # --- copies --------------------------------------------------------------------------

    def _is_in(self, c: Component, w: Waiter) -> bool:
        if c.name in self._gone:
            return False
        there = c.state in (State.RESIDENT, State.LOADING) or c.name in self._used
        there = there or twins.to_join(self._ledger, c) is not None
        return there and not eviction.leaves_first(c, w)

    def _load(self, c: Component, room: Eta) -> None:
        begins = max(room, self._gap, key=_first_to_end)
        fits = begins.seconds < self._gap_until
        if not fits:
            begins = max(room, self._lane, key=_first_to_end)
            self._gap, self._gap_until = self._lane, begins.seconds
        if c.copy_s is None or c.scratch == "saved":
            ends = self._copied(begins, bytes_in(c))
        else:
            ends = begins.plus(c.copy_s)
        if c is self._running:
            ends = self._under_way(ends, max(c.load_started, self._ledger.lane_in.ended_at))
        self._ends[c.name] = ends
        if fits:
            self._gap = ends
        else:
            self._lane = ends

    def _copied(self, since: Eta, nbytes: int) -> Eta:
        if not nbytes:
            return since
        rate = self._ledger.lane_in.bytes_per_s
        return since.plus(nbytes / rate) if rate else _NO_RATE

    def _under_way(self, ends: Eta, since: float) -> Eta:
        return ends if ends.unknown else Eta(max(ends.seconds - max(self._now - since, 0.0), 0.0))


def bytes_in(c: Component) -> int:
    """Return the bytes of the next load. Scratch that is being saved will load what is saved."""
    return c.bytes_back if c.evicting and c.dirty else c.bytes_in
