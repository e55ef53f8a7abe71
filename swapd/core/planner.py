"""Eviction is decided here: `make_room` says what goes, `policy.py` which and when.

Lives here: whose turn it is, what must go to let it in, who is told to give way, what is
brought in ahead. `plan` makes all these decisions, after any event that could change one.
The exceptions are made by the ledger: a `sequential` component goes when it is released, an
unregistered one and a part that is not kept any more at once, one that was updated when nobody
holds it.

A victim is no longer RESIDENT when its eviction is ordered, so no decision counts it twice.
What would go is said by functions that change nothing, `choose` and `in_the_way`, so that
`forecast.py` can ask them too.
"""

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from swapd.core import coming, leaving, policy, telling
from swapd.core.admission import Admission
from swapd.core.ledger import Ledger
from swapd.core.records import Agent, Component, State, Waiter


class Room(NamedTuple):
    """What goes so that something else can come in."""

    rivals: list[Component]
    victims: list[Component]


def at_hand(ledger: Ledger, asked: list[Component]) -> int:
    """Chunks that may be taken now. Those being saved are, but by a copy that follows."""
    if asked and asked[0].workspace:  # then it is asked for alone
        return ledger.pool.free
    return ledger.pool.free + ledger.inheritable


def choose(
    ledger: Ledger,
    asked: list[Component],
    missing: int,
    rivals: list[Component],
    may_evict: Callable[[Component], bool],
) -> Room | None:
    """What goes so that `asked` can take `missing` chunks, or None if not all of it can go."""
    idle_rivals = [r for r in rivals if r.name in ledger.idle and may_evict(r)]
    if len(idle_rivals) + sum(r.evicting for r in rivals) < len(rivals):  # 2
        return None
    short = missing - ledger.pool.free - ledger.leaving  # 3
    short -= sum(r.chunks for r in idle_rivals)
    if short <= 0:
        return Room(idle_rivals, [])
    if short > ledger.idle.chunks:
        return None
    spare = {c.name for c in (*asked, *rivals)}
    idle = (c for c in ledger.idle if c.name not in spare)
    chosen = policy.victims(short, ((c.name, c.chunks) for c in idle if may_evict(c)))
    if chosen is None:
        return None
    return Room(idle_rivals, [ledger.components[name] for name in chosen])


def in_the_way(
    ledger: Ledger,
    asked: list[Component],
    missing: int,
    rivals: list[Component],
    owner: Agent,
) -> list[Component]:
    """What must go to let `owner` have `asked`, and cannot now: idle ones, leased ones, rivals.

    An idle one that is wanted is kept for who waits: were it lent again meanwhile, two that
    take turns could keep out forever who needs both.
    """
    spare = {c.name for c in asked} | {r.name for r in rivals}
    short = missing - ledger.pool.free - ledger.leaving
    short -= sum(r.chunks for r in rivals if not r.evicting)
    leased = ledger.holders.to_give_way()
    others = (c for c in leased if not _only_holder(c, owner))
    may_go = (c for c in chain(ledger.idle, others) if c.name not in spare)
    names = policy.victims(short, ((c.name, c.chunks) for c in may_go))
    if names is not None:
        going = [ledger.components[name] for name in names]
    else:
        leased = ledger.holders.to_give_way()
        others = (c for c in leased if not _only_holder(c, owner))
        going = [c for c in chain(ledger.idle, others) if c.chunks and c.name not in spare]
    return going + [r for r in rivals if r.leases or r.name in ledger.idle]


def _only_holder(c: Component, agent: Agent) -> bool:
    return len(c.agents) == 1 and agent in c.agents


def stays_until(ledger: Ledger, c: Component) -> float:
    """Until when the minimum-residency rule keeps `c` though it is idle; past if it does not."""
    rules = ledger.rules
    return policy.protected_until(
        resident_since=c.resident_since,
        idle_since=c.idle_since,
        swap_in_s=c.swap_in_s or 0.0,
        gap_s=c.gap_s,
        factor=rules.residency_factor,
        bound_s=rules.residency_bound_s,
    )


class Planner:
    def __init__(self, ledger: Ledger, admission: Admission) -> None:
        self._ledger = ledger
        self._admission = admission
        self._planned_at = 0.0
        self._plan_again_at: float | None = None
        #: Whether somebody waits, in vain unless leases end.
        self._held_up = False

    def next_deadline(self) -> float | None:
        """When `plan` may decide otherwise though nothing happened; None if never."""
        times = (self._plan_again_at, self._admission.queue.next_deadline(self._planned_at))
        return min((t for t in times if t is not None), default=None)

    def plan(self) -> None:
        """Decide all that can be decided now. Run again after every event that matters, and
        after itself until it changes nothing.

        0. Who is past its deadline is refused, before anything is started for it; and who
           needs the device to do something when it is down.
        1. Whoever's turn it is gets room, if there is or can be any, and is admitted.
        2. If it must wait, those overtake it that hold what it needs and wait themselves:
           only when they have run will its memory come free. As few as will do.
        3. Prefetches get what nobody waits for.
        4. Holders are told that their memory is wanted, or no longer; and all of them, at once,
           that somebody waits for leases to end.
        """
        ledger, admission = self._ledger, self._admission
        admission.refuse_late()  # 0
        if ledger.down:
            admission.refuse_what_cannot_come_in()
        ledger.replan = False
        self._planned_at = ledger.now
        self._plan_again_at = None
        self._held_up = False
        wanted = {n for n, c in ledger.superseded.items() if self._may_be_asked_for(c)}
        while (head := admission.queue.head(ledger.now)) is not None:  # 1
            if not self.make_room(head, wanted):
                break
            admission.admit(head)
        for w in admission.overtakers(head) if head else ():  # 2
            if self.make_room(w, wanted):
                admission.admit(w)
                ledger.replan = True
                break
        if ledger.room_shrank:
            ledger.room_shrank = False
            admission.refuse_what_no_longer_fits()
        if ledger.replan:
            return  # something changed: decide again before anybody is told
        if not admission.queue.queued:  # 3
            self._prefetch_all()
        for w in list(admission.untold.values()):
            admission.tell_waiting(w)
        self._tell_wanted(wanted)  # 4
        if self._held_up:
            telling.hurry(ledger)
        elif ledger.hurried:
            telling.take_time(ledger)

    def make_room(self, w: Waiter | None, wanted: set[str], only: Component | None = None) -> bool:
        """Evict what `w` needs evicted; return whether its chunks may be taken now.

        Evicts nothing unless all that is needed can go: 1. what it asks for has finished
        leaving, if it was leaving or was updated meanwhile; 2. its rivals (other members of an
        alternating group) are idle or leaving; 3. the free chunks, those about to be free, its
        rivals' and the victims that `policy.victims` picks are enough together. Otherwise adds
        to `wanted` who should give way. `only` stands for the component of a prefetch, which
        has no waiter; nothing goes for one that would leave after its use.
        """
        ledger = self._ledger
        asked = [ledger.components[n] for n in w.names] if w else [only] if only else []
        if ledger.superseded and any(ledger.must_leave_first(c, w) for c in asked):  # 1
            if w is not None:
                self._admission.tell_waiting(w)
            return False
        if any(c.evicting for c in asked):
            return False
        rivals = ledger.rivals(asked)
        missing = sum(c.chunks for c in asked if c.state is State.ABSENT)
        if missing <= at_hand(ledger, asked) and not rivals:
            return True
        if only is not None and only.policy == "sequential":
            return False
        room = choose(ledger, asked, missing, rivals, self._may_evict)
        if room is None:
            if w is not None:
                self._held_up = True
                for c in in_the_way(ledger, asked, missing, rivals, w.owner):
                    if self._is_quantum_over(c):
                        wanted.add(c.name)
                self._admission.tell_waiting(w)
            return False
        key = w.key if w else None
        for c in room.rivals:
            leaving.evict(ledger, c, "alternating", key)
        for c in room.victims:
            leaving.evict(ledger, c, "room", key)
        return not any(r.evicting for r in rivals) and missing <= at_hand(ledger, asked)

    # --- how long a component stays ------------------------------------------------------

    def _may_evict(self, c: Component) -> bool:
        """The minimum-residency rule; notes when to look again if it says no."""
        until = stays_until(self._ledger, c)
        if until <= self._ledger.now:
            return True
        self._look_again(until)
        return False

    def _is_quantum_over(self, c: Component) -> bool:
        """Whether its holders may be asked to give way; notes when to look again if not.

        One that is still loading has yet to begin; the end of the copy is looked at anyway.
        """
        if c.state is State.LOADING:
            return False
        rules = self._ledger.rules
        quantum = policy.quantum_s(
            c.swap_in_s or 0.0, rules.residency_factor, rules.residency_bound_s
        )
        over = c.resident_since + quantum
        if over <= self._ledger.now:
            return True
        self._look_again(over)
        return False

    @staticmethod
    def _may_be_asked_for(c: Component) -> bool:
        """Whether the holders of an updated one are to give it back: not before it is in."""
        return c.state is State.RESIDENT and bool(c.leases)

    def _look_again(self, at: float) -> None:
        if self._plan_again_at is None or at < self._plan_again_at:
            self._plan_again_at = at

    # --- who gives way -------------------------------------------------------------------

    def _tell_wanted(self, wanted: set[str]) -> None:
        """Tell holders what changed since they were last told."""
        ledger = self._ledger
        for name in [n for n in ledger.wanted if n not in wanted]:
            telling.unwant(ledger, name)
            self._admission.share(ledger.components[name])
        for name in sorted((wanted - ledger.wanted.keys()) | (wanted & ledger.joined.keys())):
            telling.want(ledger, name)

    # --- prefetches ----------------------------------------------------------------------

    def _prefetch_all(self) -> None:
        ledger = self._ledger
        for name in list(ledger.prefetches):
            if not self._try_prefetch(ledger.components[name]):
                if ledger.leaving:
                    return  # the room that is coming is meant for this one
                if not (ledger.pool.free or ledger.idle.chunks):
                    return  # and there is none for those behind it

    def _try_prefetch(self, c: Component) -> bool:
        """Bring `c` in if there is room or can be; whether the prefetch is settled."""
        ledger = self._ledger
        if c.unregistering or (c.on_device and not c.evicting and not c.superseded):
            del ledger.prefetches[c.name]
            return True
        if not self.make_room(None, set(), only=c):
            return False
        del ledger.prefetches[c.name]
        coming.load(ledger, c)
        return True
