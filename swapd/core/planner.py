"""Decides whose turn it is, what leaves for it, which holders give way, what is loaded ahead.

An ordered eviction ends the state RESIDENT, so no decision counts a victim twice.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice

from swapd.core import admission, deadlock, eviction, sharing, transfers, twins
from swapd.core.eviction import Blocked, Refusal, Room
from swapd.core.ledger import Ledger
from swapd.core.queue import LOOKED_AT
from swapd.core.records import Component, Key, Waiter
from swapd.core.states import State
from swapd.shared.protocol import NUMBER_MAX

#: After this time, a component in the way of the head is open to other agents of its holders'
#: sessions, and then after twice as long each time: see `sharing.goes_on`.
CLOSED_S = 0.25


class Planner:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._planned_at = 0.0
        self._plan_again_at: float | None = None
        self._held_up = False

    def next_deadline(self) -> float | None:
        """Return when `plan` may decide differently without an event; None if never."""
        times = (self._plan_again_at, self._ledger.queue.next_deadline(self._planned_at))
        return min((t for t in times if t is not None), default=None)

    def plan(self) -> None:
        """Make all decisions. Runs after every event that matters, until nothing changes.

        0. Refuse waiters past their deadline, so that nothing is started for them; with the device
           down, also those that need a load.
        1. Make room for the head of the queue and admit it; then the next.
        2. If the head must wait, admit agents that wait themselves and hold what it needs, as few
           as will do: its memory comes free only after they have run. If there are none, admit a
           waiter that fits beside the head for good.
        3. Give prefetches memory, if no acquire waits for any.
        4. Tell holders whether their components are wanted, and whether an acquire waits for leases
           to end.
        """
        ledger = self._ledger
        admission.refuse_late(ledger)  # 0
        if ledger.down:
            self._refuse_all(lambda w, asked: eviction.cannot_come_in(ledger, asked, w))
        ledger.replan = False
        self._planned_at = ledger.now
        self._plan_again_at = None
        self._held_up = False
        wanted = {n for n, c in ledger.superseded.items() if self._may_be_asked_for(c)}
        in_the_way = self._admit_all(wanted)  # 1, 2
        self._close_all(in_the_way | wanted)
        if ledger.room_shrank:
            ledger.room_shrank = False
            self._refuse_all(lambda _, asked: eviction.never_fits(ledger, asked))
            admission.refuse_deadlocked(ledger)
        if ledger.replan:
            return  # decide again before holders are told
        if not ledger.queue.queued:  # 3
            self._prefetch_all()
        for w in list(ledger.queue.untold.values()):
            admission.tell_waiting(ledger, w)
        self._tell_wanted(wanted)  # 4
        if self._held_up:
            ledger.hurry()
        elif ledger.notices.hurried:
            ledger.take_time()

    def _refuse_all(self, problem_of: Callable[[Waiter, list[Component]], Refusal | None]) -> None:
        for w in list(self._ledger.queue.queued):
            if problem := problem_of(w, self._ledger.named(w.names)):
                admission.refuse_as(self._ledger, w, problem)

    def _admit_all(self, wanted: set[str]) -> set[str]:
        """Admit waiters; return what is in the way of the first that must wait. Adds to `wanted`
        what its holders should release."""
        ledger = self._ledger
        in_the_way: set[str] = set()
        ledger.closed_from = None
        while (head := ledger.queue.head(ledger.now)) is not None:
            if self._make_room(head, wanted, in_the_way):
                admission.admit(ledger, head)
                continue
            overtakers = deadlock.overtakers(ledger, head)
            first = next((w for w in overtakers if self._make_room(w, wanted, in_the_way)), None)
            if first is None and not self._is_somebody_back_soon():
                beside = candidates(ledger, head)
                first = next((w for w in beside if self._make_room_beside(head, w)), None)
            if first is not None:
                admission.admit(ledger, first)
                ledger.replan = True
            self._note_bound(head, in_the_way)
            break
        return in_the_way

    def _note_bound(self, head: Waiter, in_the_way: set[str]) -> None:
        ledger = self._ledger
        if head.head_since is None:
            head.head_since = ledger.now
        if sharing.is_bound_reached(ledger, head):
            chunks = [ledger.components[name].chunks for name in in_the_way]
            ledger.closed_from = min(chunks, default=NUMBER_MAX)
        until = head.head_since + ledger.rules.turn_s
        if ledger.now < until and ledger.holders.leased:
            self._look_again(until)

    def _is_somebody_back_soon(self) -> bool:
        """Return whether an idle component may be within its minimum residency, and so in the way
        of the head for a while."""
        until = self._ledger.busy_until
        if until > self._ledger.now:
            self._look_again(until)
        return until > self._ledger.now

    def _make_room_beside(self, head: Waiter, w: Waiter) -> bool:
        asked = self._ledger.named(w.names)
        use_s = eviction.usual_use_s(asked)

        def may_evict(c: Component) -> bool:
            return c.name not in head.names and self._may_evict(c, w.priority, use_s)

        return self._take_room(w, asked, may_evict)

    def _make_room(self, w: Waiter, wanted: set[str], in_the_way: set[str]) -> bool:
        """Evict the victims for `w`; return whether it may have its chunks now. If not, add to the
        two sets."""
        asked = self._ledger.named(w.names)
        use_s = eviction.usual_use_s(asked)

        def may_evict(c: Component) -> bool:
            return self._may_evict(c, w.priority, use_s)

        found = eviction.room(self._ledger, w, asked, may_evict)
        if isinstance(found, Room):
            return self._evict(found, asked, w.key)
        self._is_blocked(w, found)
        for c in found.by:  # empty if it waits for its own components or twins
            in_the_way.add(c.name)
            if self._is_quantum_over(c, w.priority, use_s):
                wanted.add(c.name)
        return False

    def _take_room(
        self,
        w: Waiter | None,
        asked: list[Component],
        may_evict: eviction.MayEvict,
        over: tuple[str, ...] | None = None,
    ) -> bool:
        """Evict the victims if that makes room. No holder gives way."""
        found = eviction.room(self._ledger, w, asked, may_evict, over)
        return not isinstance(found, Blocked) and self._evict(found, asked, w.key if w else None)

    def _evict(self, found: Room, asked: list[Component], key: Key | None) -> bool:
        for c in found.rivals:
            transfers.evict(self._ledger, c, "alternating", key)
        for c in found.victims:
            transfers.evict(self._ledger, c, "room", key)
        still_in = any([r.evicting for r in found.excluded])
        missing = eviction.missing_chunks(self._ledger, asked)  # a rival may have been a twin
        return not still_in and missing <= self._ledger.pool.free

    def _is_blocked(self, w: Waiter, found: Blocked) -> None:
        w.bound = sharing.bound(self._ledger, w, found.by)
        self._held_up |= found.by_holders
        if found.by_holders or any(c.superseded for c in found.leaving):
            admission.tell_waiting(self._ledger, w)
        for twin in found.coming:
            transfers.hasten(self._ledger, twin, min(twin.urgency, (0, *w.order)))

    # --- how long a component stays ------------------------------------------------------

    def _may_evict(self, c: Component, priority: int, use_s: float) -> bool:
        """Return whether the minimum residency of `c` is over; if not, note when to look again."""
        until = eviction.stays_until(self._ledger, c, priority, use_s)
        if until <= self._ledger.now:
            return True
        self._ledger.busy_until = max(self._ledger.busy_until, until)
        self._look_again(until)
        return False

    def _is_quantum_over(self, c: Component, priority: int, use_s: float) -> bool:
        """Return whether the holders of `c` may be asked to give way; if not, note when to look
        again. A load in flight has no quantum yet, and its end is an event."""
        if c.state is State.LOADING:
            return False
        over = c.resident_since + eviction.quantum_s(self._ledger, c, priority, use_s)
        if over <= self._ledger.now:
            return True
        self._look_again(over)
        return False

    @staticmethod
    def _may_be_asked_for(c: Component) -> bool:
        return c.state is State.RESIDENT and bool(c.leases)

    def _look_again(self, at: float) -> None:
        if self._plan_again_at is None or at < self._plan_again_at:
            self._plan_again_at = at

    # --- who gives way -------------------------------------------------------------------

    def _tell_wanted(self, wanted: set[str]) -> None:
        ledger = self._ledger
        told, joined = ledger.notices.wanted, ledger.notices.joined
        for name in [n for n in told if n not in wanted]:
            ledger.unwant(name)
        for name in sorted([n for n in wanted if n not in told or n in joined]):
            ledger.want(name)

    def _close_all(self, in_the_way: set[str]) -> None:
        ledger = self._ledger
        before, ledger.in_the_way = ledger.in_the_way, in_the_way
        for name in sorted(in_the_way):
            self._close(ledger.components[name], anew=name not in before)
        for name in list(ledger.held_back):
            c = ledger.components.get(name)
            if c is None or c.state not in (State.LOADING, State.RESIDENT):
                del ledger.held_back[name]
            elif ledger.closed_from is None or not sharing.is_closed(ledger, c):
                admission.share(ledger, c)
            elif name not in in_the_way:  # it could leave instead of one that is
                in_the_way.add(name)
                self._close(c, anew=name not in before)

    def _close(self, c: Component, *, anew: bool) -> None:
        """Close `c` to other agents of its holders' sessions for a while, then admit one that
        waited. Each period is twice as long as the last, so that every lease ends within one."""
        now = self._ledger.now
        if anew or c.closed_until <= now:
            if not anew:
                admission.share_with_one(self._ledger, c)
            c.closed_s = CLOSED_S if anew else max(CLOSED_S, 2 * c.closed_s)
            c.closed_until = now + c.closed_s
        if c.waiting:
            self._look_again(c.closed_until)

    # --- prefetches ----------------------------------------------------------------------

    def _prefetch_all(self) -> None:
        """Load prefetches; those with `over` one at a time, so that an acquire waits for at most
        one of their copies."""
        ledger = self._ledger
        in_vain: dict[Hashable, int] = {}
        may_free = self._may_free_ahead() if ledger.prefetches else 0
        for c in self._to_prefetch():
            over = ledger.prefetches[c.name]
            kind = c.part_of, c.group, c.policy, over  # what decides, beside its size
            if c.chunks >= in_vain.get(kind, c.chunks + 1):
                continue  # one of its kind that is no larger found no room
            if c.chunks <= may_free and self._load_ahead(c, over):
                may_free = self._may_free_ahead()
            elif ledger.leaving or not (ledger.pool.free or ledger.idle.chunks):
                return  # keep what is about to be free for this one; or no other finds room
            elif eviction.steps_first(ledger, None, [c]) is None:
                in_vain[kind] = c.chunks

    def _to_prefetch(self) -> Iterator[Component]:
        ledger = self._ledger
        for name, over in list(ledger.prefetches.items()):
            c = ledger.components[name]
            if over is not None and ledger.ahead in ledger.moves:
                continue
            if self._needs_no_load(c):
                del ledger.prefetches[name]
            else:
                yield c

    def _may_free_ahead(self) -> int:
        ledger = self._ledger
        may_go = sum([c.chunks for c in ledger.idle if not c.expected])
        return ledger.pool.free + ledger.leaving + may_go

    def _needs_no_load(self, c: Component) -> bool:
        is_there = c.on_device and not c.evicting and not c.superseded
        return c.unregistering or is_there or twins.to_join(self._ledger, c) is not None

    def _load_ahead(self, c: Component, over: tuple[str, ...] | None) -> bool:
        ledger = self._ledger

        def may_evict(other: Component) -> bool:
            may_go = eviction.may_go_for(c, other, over)
            return may_go and self._may_evict(other, other.priority, 0.0)

        if not self._take_room(None, [c], may_evict, over):
            return False
        ledger.prefetches.pop(c.name)
        transfers.load(ledger, c)
        if over is not None:
            ledger.ahead = c.generation
        return True


# --- who may go before the head of the queue, because that does not delay its grant --------------
# Backfill with a reservation, as in batch schedulers: the head keeps its room, and a later waiter
# may have the rest for any time.


#: Most components of a waiter, and of all leases. With more, no waiter goes before the head.
NAMES_MAX = 64


def candidates(ledger: Ledger, head: Waiter) -> Iterator[Waiter]:
    """Yield waiters whose room delays no grant of `head`, whichever leases end first.

    They have no leases, which `head` may wait for. Their components are in no group, and out: one
    that is in may have to leave for `head`.
    """
    left = _left_beside(ledger, head) if eviction.may_free(ledger) else 0
    if left <= 0:
        return
    for w in islice(ledger.queue.queued, LOOKED_AT + 1):
        asked = _few(ledger, w)
        if w is head or not asked or w.owner in ledger.holders.by_agent:
            continue
        if eviction.are_out(asked) and sum([c.chunks for c in asked]) <= left:
            yield w


def _few(ledger: Ledger, w: Waiter) -> list[Component]:
    """Return the components of `w`; [] if they are many, or if more than memory decides whether one
    comes in."""
    if len(w.names) > NAMES_MAX or ledger.pool.shared:  # twins share chunks, which are counted once
        return []
    asked = ledger.named(w.names)
    bound = any(c.group is not None or c.superseded or c.unregistering for c in asked)
    return [] if bound else asked


def _left_beside(ledger: Ledger, head: Waiter) -> int:
    """Return the chunks that `head` leaves free in the tightest state in which it could be granted.

    That is once the remaining leases have at most `most` chunks. The tightest is the largest sum of
    some leases up to `most`.
    """
    pool, all_leased = ledger.pool, ledger.holders.leased
    asked = _few(ledger, head)
    if not asked or len(all_leased) > NAMES_MAX:
        return 0
    most = pool.total - ledger.fixed_chunks(asked) - sum([c.chunks for c in asked])
    if most < 0:
        return 0
    leased = [c for c in all_leased.values() if not c.fixed]
    # What is leaving, lent or promised may be there at the grant, in whole or in part.
    coming_and_going = pool.total - pool.free - ledger.idle.chunks - ledger.fixed
    coming_and_going -= sum([c.chunks for c in leased])
    sums = _sums(c.chunks for c in leased if c.name not in head.names)
    sums = _with_any_part_of(sums, coming_and_going)
    reached = sums & ((1 << (most + 1)) - 1)
    return most - (reached.bit_length() - 1)


def _sums(parts: Iterable[int]) -> int:
    """Return the sums of all subsets as bits: bit n is set if a subset has the sum n."""
    sums = 1
    for part in parts:
        sums |= sums << part
    return sums


def _with_any_part_of(sums: int, whole: int) -> int:
    """Return the sums with each number from 0 to `whole` added."""
    step = 1
    while whole > 0:
        sums |= sums << min(step, whole)
        whole -= step
        step *= 2
    return sums
