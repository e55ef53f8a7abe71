"""When a waiter will be granted, if all goes as usual. Pure; changes nothing.

Plays the queue forward: each waiter gets in its turn the room that comes free first, and its loads
run behind those of the waiters before it. Computed only when somebody asks.
"""

from collections.abc import Iterator
from itertools import islice
from math import inf
from operator import attrgetter
from typing import NamedTuple

from swapd.core import eviction, explain
from swapd.core.ledger import Ledger
from swapd.core.queue import LOOKED_AT
from swapd.core.records import Component, State, Waiter
from swapd.shared.units import seconds

#: Most leased components that one waiter may count on: those that give way first.
LEASED_MAX = 64
#: Holders that keep a component for longer than this multiple of its usual use, and so many seconds
#: for which a client may keep an unused lease, may keep it for any time.
LATE, KEPT_S = 4.0, 1.0
#: A use that should end now lasts for this share of the usual time: uses vary.
REST = 1 / 16


class Eta(NamedTuple):
    """Seconds from now; infinite if that is `unknown`, and why, for people."""

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

#: What may go: when, its chunks, and the component; None: what leaves already.
MayGo = tuple[Eta, int, Component | None]


def _first_to_go(one: MayGo) -> float:
    return one[0].seconds


def eta(ledger: Ledger, w: Waiter, now: float) -> Eta:
    """When `w` is granted, which may be in no queue: then it comes last, or is the first if it
    needs no turn."""
    if w.parked or not ledger.components.keys() >= set(w.names):
        return PARKED
    return next((found for other, found in etas(ledger, now, w) if other is w), MANY)


def etas(ledger: Ledger, now: float, new: Waiter | None = None) -> Iterator[tuple[Waiter, Eta]]:
    """The first waiters, in the order of their turns, and `new`."""
    course, queue = _Course(ledger, now), ledger.queue
    first = sorted((w for w in queue if w.admitted), key=attrgetter("order"))
    first += [new] if new is not None and not new.queued else []
    turns = sorted(islice(queue.queued, LOOKED_AT), key=lambda w: w is not queue.head(now))
    if new is not None and len(turns) < LOOKED_AT:
        turns.append(new)
    for w in dict.fromkeys(first + turns):
        yield w, course.grant(w)


def end_of_use(ledger: Ledger, c: Component, now: float) -> Eta:
    """When the leases of `c` end.

    The daemon does not see the uses of a lease that its client keeps between them, nor that it is
    not in use: it comes back with the next end of a use, once its holder hears that somebody waits.
    """
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
    """What comes free when, as one waiter after the other is granted."""

    def __init__(self, ledger: Ledger, now: float) -> None:
        self._ledger, self._now = ledger, now
        #: Chunks that no waiter before needs, by its turn and now; and those that leave already.
        self._free = self._free_now = ledger.pool.free
        self._leaving = ledger.leaving
        #: The turn of the next waiter, and the end of the loads before its own.
        self._turn = self._lane = NOW
        #: The time before the last load in which no load is under way: from, and until.
        self._gap, self._gap_until = NOW, 0.0
        moving = (m.component for m in ledger.moves.values())
        coming = (c for c in moving if c.state is State.LOADING and not c.workspace)
        #: Loads under way, in their order, until they are played; then the end of each.
        self._coming = sorted(coming, key=attrgetter("urgency"))
        self._running = self._coming[0] if self._coming else None
        self._ends: dict[str, Eta] = {}
        #: Until when holders use components; the same of waiters; and what goes for them, and is
        #: not in.
        self._held: dict[str, Eta] = {}
        self._used: dict[str, Eta] = {}
        self._gone: set[str] = set()

    def grant(self, w: Waiter) -> Eta:
        """Play `w`, whose turn it is."""
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
        """When there is room for what is absent, and it is the turn of `w`.

        Who needs no more than what is free goes before those that wait, if they need less.
        """
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
        """Play that `must` and others go until `short` chunks are free for `w`; when each goes."""
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
        """Play its eviction; return the chunks that come free by it."""
        self._gone.add(c.name)
        return 0 if c.evicting else c.chunks

    def _may_go(self, w: Waiter, short: int, use_s: float) -> Iterator[MayGo]:
        """What may go for `w`, and when; of idle components no more than are needed."""
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
        """When `c` can have left for `w`."""
        if c.evicting:
            return self._saved()
        ends, since = self._used.get(c.name), None
        if ends is None and c.leases:
            if c.name not in self._held:
                self._held[c.name] = end_of_use(self._ledger, c, self._now)
            ends = self._held[c.name]
        if ends is not None:
            since = self._now + ends.seconds
        if c.leases and c.kept_on:  # its turn goes on
            until = c.resident_since + eviction.quantum_s(self._ledger, c, w.priority, use_s)
        else:
            until = eviction.stays_until(self._ledger, c, w.priority, use_s, since)
        left = max(ends or NOW, Eta(until - self._now), key=_first_to_end)
        return self._copied(left, c.bytes_back)

    def _saved(self) -> Eta:
        """When all that leaves already has left."""
        out = self._ledger.lane_out
        moves = [m for m in self._ledger.moves.values() if m.lane is out]
        saved = self._copied(NOW, sum([m.component.bytes_back for m in moves]))
        since = max(moves[0].began, out.ended_at) if moves else self._now
        return self._under_way(saved, since)

    # --- copies --------------------------------------------------------------------------

    def _is_in(self, c: Component, w: Waiter) -> bool:
        """Whether it needs no load for `w`, as things will be then."""
        if c.name in self._gone:
            return False
        there = c.state in (State.RESIDENT, State.LOADING) or c.name in self._used
        return there and not eviction.leaves_first(c, w)

    def _load(self, c: Component, room: Eta) -> None:
        """The load of `c`, once there is room, and the loads before it have ended."""
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
        """The same for a copy that began then."""
        return ends if ends.unknown else Eta(max(ends.seconds - max(self._now - since, 0.0), 0.0))


def bytes_in(c: Component) -> int:
    """Bytes of its next copy in: for scratch that has to leave first, the bytes that its save
    copies."""
    return c.bytes_back if c.evicting and c.dirty else c.bytes_in
