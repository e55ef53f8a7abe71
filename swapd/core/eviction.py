"""Which components go to make room for a request, or on their own. Pure; changes nothing.

Only this module decides that: `planner.make_room` evicts these, `admission.py` carries out all
other verdicts on a request, `status.py` prints them, `explain.py` words them. `at_once(...)` finds
requests that can never be granted, or need no memory. `room(...)` finds for any other which
components go so that its own can come in, or which are in its way; `victims` picks them.
"""

from collections.abc import Callable, Collection, Iterable
from itertools import chain, takewhile
from typing import Literal, NamedTuple, TypeVar

from swapd.core.actions import Reason
from swapd.core.foresight import Candidate, going
from swapd.core.ledger import Ledger
from swapd.core.records import Component, State, Waiter
from swapd.shared.protocol import NUMBER_MAX, Code

#: A component whose owner comes back within this share of its swap-in time is busy: evicting it
#: between two uses would cost more than it gives.
BUSY_SHARE = 0.25

#: Others overtake the head of the queue for this multiple of the time of its load at most.
OVERTAKEN_LOADS = 64

MayEvict = Callable[[Component], bool]
Thing = TypeVar("Thing")


class Refusal(NamedTuple):
    """The request can never be granted. `of`: the components that are the cause."""

    why: Literal["down", "conflict", "too_large"]
    of: list[Component]

    @property
    def code(self) -> Code:
        return "device_failed" if self.why == "down" else self.why


class Shared(NamedTuple):
    """All its components are in, or loading: it needs no memory."""


class Room(NamedTuple):
    """The components that go so that it can come in: members of its alternating groups, and
    victims."""

    rivals: list[Component]
    victims: list[Component]
    #: All rivals that are in, also those that are leaving already.
    excluded: list[Component]
    #: Number of chunks that it needs.
    missing: int


class Blocked(NamedTuple):
    """It has to wait until its own components have left, or until others go."""

    #: Its own components that have to leave before they come in anew.
    leaving: list[Component]
    #: Components that must go and cannot now: idle ones, leased ones, rivals.
    by: list[Component]


# --- at once -----------------------------------------------------------------------------


def at_once(ledger: Ledger, w: Waiter, asked: list[Component]) -> Refusal | Shared | None:
    """The verdict on a request regardless of others; None: it needs memory."""
    if ledger.down and (problem := cannot_come_in(ledger, asked, w)):
        return problem
    return Shared() if may_share(ledger, w, asked) else never_fits(ledger, asked)


def may_share(ledger: Ledger, w: Waiter, asked: Iterable[Component]) -> bool:
    """Whether `w` needs no memory, and may go before those that came earlier.

    A component that must go for somebody that waits takes some new holders, but not for ever: see
    `may_join`. An updated component takes none: a request that comes now must see the new bytes. A
    late request joins no load.
    """
    enough = (State.RESIDENT,) if is_late(ledger, w) else (State.RESIDENT, State.LOADING)
    for c in asked:
        if c.state not in enough or c.unregistering:
            return False
        if c.superseded and must_leave_first(c, w):
            return False
    return all(may_join(ledger, c, w) for c in asked)


def may_join(ledger: Ledger, c: Component, w: Waiter) -> bool:
    """Whether `w` may become a holder of `c`, which is in or coming, though somebody else may wait
    for its memory.

    A bounded number of waiters may, for a bounded time.
    """
    return not is_closed(ledger, c) or goes_on(ledger, c, w) or may_overtake(ledger, w)


def is_closed(ledger: Ledger, c: Component) -> bool:
    """Whether `c` is in the way of the head of the queue, or could go instead of what is.

    That matters once nobody may overtake the head.
    """
    if c.name in ledger.in_the_way or ledger.closed_from is None:
        return True
    return c.chunks >= ledger.closed_from and c.policy != "permanent"


def may_overtake(ledger: Ledger, w: Waiter) -> bool:
    """Whether a waiter that needs no memory may be admitted before the head of the queue."""
    head = ledger.queue.head(ledger.now)
    if head is None or head is w or ledger.queue.outranks(w, head):
        return True
    return not is_bound_reached(ledger, head)


def is_bound_reached(ledger: Ledger, head: Waiter) -> bool:
    """Whether as many as may have overtaken the head of the queue, or for as long as they may."""
    if head.bound is None or head.head_since is None:
        return False  # no decision has found it waiting yet
    return head.overtaken >= head.bound or ledger.now >= head.head_since + ledger.rules.turn_s


def bound(ledger: Ledger, head: Waiter, by: Iterable[Component]) -> int:
    """How many may overtake the head of the queue, with these in its way."""
    most = ledger.rules.overtake if head.overtake is None else head.overtake
    rate = ledger.lane_in.bytes_per_s
    if not most or not rate:
        return most
    load_s = missing_chunks(ledger.named(head.names)) * ledger.chunk_bytes / rate
    return min(most, worth(load_s, max([c.use_s for c in by], default=0.0)))


def worth(load_s: float, use_s: float) -> int:
    """How many uses of `use_s` may go before one that needs a load of `load_s`.

    They save loads, and it waits for all of them: no longer than a multiple of its load's time.
    """
    return int(OVERTAKEN_LOADS * load_s / use_s) if use_s else NUMBER_MAX


def goes_on(ledger: Ledger, c: Component, w: Waiter) -> bool:
    """Whether the holders of `c` may need `w` to have it, or it is their turn.

    An agent that holds it could not release otherwise. And the last one that had it goes on within
    the minimum residency. Another one of a session that holds what is in the way waits, but not for
    ever: a holder may wait for it, which the daemon cannot see, or it may be one of many with
    overlapping leases.
    """
    if w.owner in c.agents:
        return True
    if hash(w.owner) == c.last_agent and c.name not in ledger.notices.wanted:
        return ledger.now < c.resident_since + quantum_s(ledger, c, c.priority)
    is_open = c.name in ledger.in_the_way and c.closed_until <= ledger.now
    return is_open and w.session in c.holders


def is_late(ledger: Ledger, w: Waiter) -> bool:
    """Whether it may only have resident components: its deadline has passed, or it is a try."""
    return w.deadline is not None and w.deadline <= ledger.now


def cannot_come_in(ledger: Ledger, asked: Iterable[Component], w: Waiter | None) -> Refusal | None:
    """With the device down: refused unless these are on it. `w` is None for a prefetch.

    A component being saved counts as on it: it will have to stay. An updated one does not.
    """
    if not ledger.down:
        return None
    absent = [
        c
        for c in asked
        if (c.state is not State.RESIDENT and not (c.evicting and c.unsaved))
        or must_leave_first(c, w)
    ]
    return Refusal("down", absent) if absent else None


def never_fits(ledger: Ledger, asked: list[Component]) -> Refusal | None:
    """Refused if a request for these together could wait forever."""
    sides = {(c.group, c.side) for c in asked if c.group is not None}
    if len({group for group, _ in sides}) < len(sides):
        return Refusal("conflict", asked)
    chunks = sum([c.chunks for c in asked])
    if chunks + ledger.fixed_chunks(asked) > ledger.pool.total:
        return Refusal("too_large", asked)
    return None


# --- room --------------------------------------------------------------------------------


def room(
    ledger: Ledger,
    w: Waiter | None,
    asked: list[Component],
    may_evict: MayEvict,
    over: tuple[str, ...] | None = None,
) -> Room | Blocked:
    """The components that go so that `asked` can come in. All of them can go, or none does.

    1. Those of `asked` that were leaving, or updated meanwhile, have left.
    2. Their rivals (other members of an alternating group) are idle or leaving.
    3. These are enough together: free chunks, those about to be free, those of rivals and of the
       victims that `victims` picks.

    `w` is None for a prefetch of one component: no holder gives way to it, and no component goes
    for a `sequential` one, which would leave after use. `over`: only these go; None: any.
    """
    if leaving := [c for c in asked if leaves_first(c, w)]:  # 1
        return Blocked(leaving, [])
    rivals = ledger.rivals(asked)
    missing = missing_chunks(asked)
    if not rivals and missing <= ledger.pool.free:
        return Room([], [], rivals, missing)
    if w is None and asked[0].policy == "sequential":
        return Blocked([], [])
    short = _short(ledger, missing, rivals)
    going = _going(ledger, w, short, rivals, asked, may_evict, over)
    if going is not None:
        return Room(*going, rivals, missing)
    if w is None:
        return Blocked([], [])
    return Blocked([], _in_the_way(ledger, w, asked, short, rivals))


def _short(ledger: Ledger, missing: int, rivals: list[Component]) -> int:
    """Number of chunks that have to come from victims."""
    of_rivals = sum([r.chunks for r in rivals if not r.evicting])
    return missing - ledger.pool.free - ledger.leaving - of_rivals


def _going(
    ledger: Ledger,
    w: Waiter | None,
    short: int,
    rivals: list[Component],
    asked: list[Component],
    may_evict: MayEvict,
    over: tuple[str, ...] | None,
) -> tuple[list[Component], list[Component]] | None:
    """The rivals that are not leaving already, and the victims; None if one of the rivals cannot
    go, or all victims are too few."""
    staying = [r for r in rivals if not r.evicting]
    for r in staying:  # 2
        if r.name not in ledger.idle or not may_evict(r):
            return None
    if short > ledger.idle.chunks:
        return None
    spare = {c.name for c in (*asked, *staying)}
    idle = ledger.idle if over is None else ledger.idle.among(over)
    may_go: Iterable[Component] = (c for c in idle if c.name not in spare and may_evict(c))
    if short > 0 and w is not None and ledger.foresight.rules:
        may_go = _foreseen(ledger, short, list(may_go), asked)
    chosen = victims(short, ((c, c.chunks) for c in may_go))  # 3
    return None if chosen is None else (staying, chosen)


def _foreseen(
    ledger: Ledger, need: int, idle: list[Component], asked: list[Component]
) -> Iterable[Component]:
    """The idle components in the order in which they should go for `asked`: those of the places
    before the least recently used, then those that are needed last."""
    rest: dict[str, list[Component]] = {}
    first = list(takewhile(lambda c: not is_foreseen(c), idle))
    for c in filter(is_foreseen, idle):
        rest.setdefault(c.side, []).append(c)
    candidates = [Candidate(name, sum([c.chunks for c in of])) for name, of in rest.items()]
    expected = ledger.foresight.expected(dict.fromkeys(c.side for c in asked))
    need -= sum([c.chunks for c in first])
    chosen = [c for one in going(need, candidates, expected) for c in rest[one.name]]
    return dict.fromkeys([*first, *chosen, *idle])


def is_foreseen(c: Component) -> bool:
    """Whether its next use is foreseen: it stays as long as its memory is not needed."""
    return c.policy == "lru" and not (
        c.workspace or c.leaves_for_nothing or c.state is State.LOADING
    )


def leaves_first(c: Component, w: Waiter | None) -> bool:
    """Whether `c` has to leave, or is leaving, before it comes in anew for `w`."""
    return c.evicting or (c.superseded and must_leave_first(c, w))


def must_leave_first(c: Component, w: Waiter | None) -> bool:
    """Whether `c` has old bytes on the device that `w` may not have.

    An agent that holds it may take it again: it could not release otherwise.
    """
    if not c.superseded or w is None:
        return c.superseded
    if w.takes_old and w.session in c.holders:
        return False
    return w.owner not in c.agents


def fits_in(ledger: Ledger, asked: list[Component], chunks: int) -> bool:
    """Whether all of these can come in at once with so many free chunks, and nothing else."""
    absent = all(c.state is State.ABSENT for c in asked)
    return absent and not ledger.rivals(asked) and missing_chunks(asked) <= chunks


def missing_chunks(asked: Iterable[Component]) -> int:
    """Number of chunks to load for all of these to be in."""
    return sum([c.chunks for c in asked if c.state is State.ABSENT])


def _in_the_way(
    ledger: Ledger, w: Waiter, asked: list[Component], short: int, rivals: list[Component]
) -> list[Component]:
    """Components that must go to let `w` have `asked`, and cannot now: idle ones, leased ones,
    those that come in for others, rivals.

    An idle component that is wanted stays for the waiter. If it could be leased again meanwhile,
    two holders that take turns could keep out a waiter that needs both for ever.
    """
    leased = (c for c in ledger.holders.to_give_way() if c.agents.keys() != {w.owner})
    coming = (m.component for m in ledger.moves.values() if m.component.state is State.LOADING)
    promised = (c for c in coming if c.promised and not c.leases and ledger.is_current(c))
    others = chain(ledger.idle, leased, promised)
    spare = {c.name for c in (*asked, *rivals)}
    chosen, short = _oldest(short, ((c, c.chunks) for c in others if c.name not in spare))
    going = _needed(chosen, short)
    return going + [r for r in rivals if r.leases or r.name in ledger.idle]


def victims(need: int, idle: Iterable[tuple[Thing, int]]) -> list[Thing] | None:
    """The components to evict to free `need` chunks, or None if all are too few.

    `idle` are components and their chunks, in the order in which they should go. Every component
    returned is necessary: oldest first alone would take too many (need 10 with idle a=1, b=10 would
    take both), so the most recent superfluous ones stay.
    """
    chosen, short = _oldest(need, idle)
    return None if short > 0 else _needed(chosen, short)


def _oldest(need: int, idle: Iterable[tuple[Thing, int]]) -> tuple[list[tuple[Thing, int]], int]:
    """The first ones that have `need` chunks, or all; and how many chunks are lacking then."""
    chosen: list[tuple[Thing, int]] = []
    for thing, chunks in idle:
        if need <= 0:
            break
        if chunks:
            chosen.append((thing, chunks))
            need -= chunks
    return chosen, need


def _needed(chosen: list[tuple[Thing, int]], short: int) -> list[Thing]:
    """Without the most recent superfluous ones; all, if chunks are lacking."""
    kept: list[Thing] = []
    for thing, chunks in reversed(chosen):
        if short + chunks <= 0:
            short += chunks
        else:
            kept.append(thing)
    return kept[::-1]


# --- when one may go ---------------------------------------------------------------------


def goes_now(c: Component, *, down: bool) -> Reason | None:
    """Why a component without holders leaves on its own, or None if it stays.

    An unregistered or updated one always leaves. A `sequential` one leaves after use, and so does a
    part that its family no longer keeps, unless a request waits for it or the device is `down`:
    then it could not come back.
    """
    if c.unregistering:
        return "unregister"
    if c.superseded:
        return "update"
    if c.waiting or down or c.policy != "sequential":
        return None
    if c.kept_no_more:
        return "resized"
    return "sequential" if c.used else None


def may_go_for(expected: Component, c: Component, over: Collection[str] | None) -> bool:
    """Whether `c`, which is idle, may be evicted to load `expected` ahead of its acquire.

    Only components in `over`, unless that is None. Never another expected one: the two would push
    each other out. Nor a part of the same family: it is needed too.
    """
    if c.expected or (c.part_of and c.part_of == expected.part_of):
        return False
    return over is None or c.name in over or c.part_of in over


def quantum_s(ledger: Ledger, c: Component, priority: int) -> float:
    """How long a component stays once it is in, seconds: a multiple of its swap-in time, within a
    bound, so that no waiter starves. Not at all for an acquire of a higher `priority` than that of
    the last lease."""
    if priority > c.priority:
        return 0.0
    rules = ledger.rules
    least_s = rules.residency_factor * (c.swap_in_s or 0.0)
    return min(least_s, rules.residency_bound_s, rules.turn_s)


def is_busy(c: Component) -> bool:
    """Whether the owner keeps using it: its last acquire came soon after the release.

    `gap_s` is the time from a release to the next acquire, also if the component was evicted in
    between. So two decode loops that evict each other's components both count as busy.
    """
    return c.gap_s is not None and c.gap_s < BUSY_SHARE * (c.swap_in_s or 0.0)


def stays_until(ledger: Ledger, c: Component, priority: int) -> float:
    """Until when an idle component may not be evicted for an acquire of this priority; a time in
    the past if it may be now.

    The minimum-residency rule: a busy component stays for its quantum, unless its owner fails to
    come back.
    """
    if c.state is State.LOADING or not is_busy(c):
        return c.idle_since
    back_by = c.idle_since + 2 * BUSY_SHARE * (c.swap_in_s or 0.0)
    return min(c.resident_since + quantum_s(ledger, c, priority), back_by)
