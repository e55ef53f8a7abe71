"""What becomes of a request now: refused, shared, given room, or blocked. Pure; changes nothing.

The one place where that is decided. `admission.py` and `planner.py` carry it out, `forecast.py`
prints it, `explain.py` words it.

`at_once(...)` says what needs no look at others: the request can never be granted, or needs no
memory. `room(...)` says of any other what goes so that its components can come in, or what is in
its way.
"""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Literal, NamedTuple

from swapd.core import policy
from swapd.core.ledger import Ledger
from swapd.core.records import Agent, Component, State, Waiter
from swapd.shared.protocol import Code

Why = Literal["damaged", "down", "conflict", "too_large"]

#: What the client is told, by why a request is refused.
CODES: dict[Why, Code] = {
    "damaged": "device_failed",
    "down": "device_failed",
    "conflict": "conflict",
    "too_large": "too_large",
}

MayEvict = Callable[[Component], bool]


class Refused(NamedTuple):
    """It can never be granted. `of`: the components because of which."""

    why: Why
    of: list[Component]


class Shared(NamedTuple):
    """All it asks for is in, or coming in: it needs no memory."""


class Room(NamedTuple):
    """What goes so that it can come in: other members of alternating groups, and victims."""

    rivals: list[Component]
    victims: list[Component]
    #: All rivals that are in, those that are leaving already among them.
    excluded: list[Component]
    #: Chunks that it needs.
    missing: int


class Blocked(NamedTuple):
    """It has to wait: until what it asks for has left, or until something else goes."""

    #: What it asks for itself, and has to leave before it comes in anew.
    leaving: list[Component]
    #: What must go and cannot now: idle ones, leased ones, rivals.
    by: list[Component]


Verdict = Refused | Shared | Room | Blocked


# --- at once -----------------------------------------------------------------------------


def at_once(ledger: Ledger, w: Waiter, asked: list[Component]) -> Refused | Shared | None:
    """What can be said of a request whatever others do; None: it needs memory."""
    if problem := hopeless(ledger, w, asked):
        return problem
    return Shared() if may_share(ledger, w, asked) else never_fits(ledger, asked)


def hopeless(ledger: Ledger, w: Waiter | None, asked: list[Component]) -> Refused | None:
    """Refused if some of it can never be had, by a prefetch (`w` is None) either."""
    if damaged := [c for c in asked if c.damaged]:
        return Refused("damaged", damaged)
    return cannot_come_in(ledger, asked, w) if ledger.down else None


def may_share(ledger: Ledger, w: Waiter, asked: Iterable[Component]) -> bool:
    """Whether `w` needs no memory, and delays nobody who was promised some.

    A component that is wanted for somebody else takes no new holders, or overlapping leases
    would keep it forever. An agent that holds it already may take it again, since it could not
    release otherwise. Another agent of the same session may be waited for by one that holds it,
    which nobody can see here, or may be one of many that overlap: so it waits, but not for ever.
    Nor does one that was updated meanwhile: a request that comes now is to see the new bytes. A
    late one joins no load.
    """
    enough = (State.RESIDENT,) if is_late(ledger, w) else (State.RESIDENT, State.LOADING)
    for c in asked:
        if c.state not in enough or c.unregistering:
            return False
        if c.superseded and must_leave_first(c, w):
            return False
        if c.name in ledger.wanted and not _may_take_again(ledger, c, w):
            return False
    return True


def _may_take_again(ledger: Ledger, c: Component, w: Waiter) -> bool:
    """Whether `w` may have `c` though it is wanted, since its holders may need it to go on."""
    if w.owner in c.agents:
        return True
    return w.session in c.holders and c.closed_until <= ledger.now


def is_late(ledger: Ledger, w: Waiter) -> bool:
    """Whether it may only have what is in: its deadline has passed, or it came to try."""
    return w.deadline is not None and w.deadline <= ledger.now


def cannot_come_in(ledger: Ledger, asked: Iterable[Component], w: Waiter | None) -> Refused | None:
    """With the device down: refused unless these are on it.

    What is being saved is: it will have to stay. What was updated is not.
    """
    absent = [
        c
        for c in asked
        if (c.state is not State.RESIDENT and not (c.evicting and c.unsaved))
        or must_leave_first(c, w)
    ]
    return Refused("down", absent) if absent else None


def never_fits(ledger: Ledger, asked: list[Component]) -> Refused | None:
    """Refused if a request for these together could wait forever."""
    sides = {(c.group, c.part_of or c.name) for c in asked if c.group is not None}
    if len({group for group, _ in sides}) < len(sides):
        return Refused("conflict", asked)
    chunks = sum(c.chunks for c in asked)
    if chunks + ledger.fixed_chunks(asked) > ledger.pool.total:
        return Refused("too_large", asked)
    return None


# --- room --------------------------------------------------------------------------------


def room(
    ledger: Ledger,
    w: Waiter | None,
    asked: list[Component],
    may_evict: MayEvict,
    over: tuple[str, ...] | None = None,
) -> Room | Blocked:
    """What goes so that `asked` can come in; nothing goes unless all that is needed can.

    1. What it asks for has finished leaving, if it was leaving or was updated meanwhile; 2. its
    rivals (other members of an alternating group) are idle or leaving; 3. the free chunks, those
    about to be free, its rivals' and the victims that `policy.victims` picks are enough together.

    `w` is None for a prefetch, which nobody gives way to, and which nothing goes for if what it
    brings in would leave after its use. `over`: nothing goes but what it names, unless it is None.
    """
    if leaving := [c for c in asked if leaves_first(c, w)]:  # 1
        return Blocked(leaving, [])
    rivals = ledger.rivals(asked)
    missing = missing_chunks(asked)
    if not rivals and missing <= at_hand(ledger, asked):
        return Room([], [], rivals, missing)
    if w is None and any(c.policy == "sequential" for c in asked):
        return Blocked([], [])
    idle = ledger.idle if over is None else ledger.idle.among(over)
    found = _choose(ledger, asked, missing, rivals, idle, may_evict)
    if found is None:
        by = [] if w is None else _in_the_way(ledger, asked, missing, rivals, w.owner)
        return Blocked([], by)
    return found


def leaves_first(c: Component, w: Waiter | None) -> bool:
    """Whether `c` has to leave, or is leaving, before it comes in anew for `w`."""
    return c.evicting or must_leave_first(c, w)


def must_leave_first(c: Component, w: Waiter | None) -> bool:
    """Whether `c` is on the device with bytes that are no longer its own, and not for `w`.

    An agent that holds it may take it again: it could not release otherwise.
    """
    if not c.superseded or w is None:
        return c.superseded
    if w.takes_old and w.session in c.holders:
        return False
    return w.owner not in c.agents


def missing_chunks(asked: Iterable[Component]) -> int:
    """Chunks that are needed so that all of these are in."""
    return sum(c.chunks for c in asked if c.state is State.ABSENT)


def at_hand(ledger: Ledger, asked: list[Component]) -> int:
    """Chunks that may be taken now. Those being saved are, but by a copy that follows."""
    if asked and asked[0].workspace:  # then it is asked for alone
        return ledger.pool.free
    return ledger.pool.free + ledger.inheritable


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


def _choose(
    ledger: Ledger,
    asked: list[Component],
    missing: int,
    rivals: list[Component],
    idle: Iterable[Component],
    may_evict: MayEvict,
) -> Room | None:
    """What goes so that `asked` can take `missing` chunks, or None if not all of it can go.

    `idle`: what may be a victim, those that should go first first.
    """
    idle_rivals = [r for r in rivals if r.name in ledger.idle and may_evict(r)]
    if len(idle_rivals) + sum(r.evicting for r in rivals) < len(rivals):  # 2
        return None
    short = missing - ledger.pool.free - ledger.leaving  # 3
    short -= sum(r.chunks for r in idle_rivals)
    if short <= 0:
        return Room(idle_rivals, [], rivals, missing)
    if short > ledger.idle.chunks:
        return None
    spare = {c.name for c in (*asked, *rivals)}
    others = (c for c in idle if c.name not in spare)
    chosen = policy.victims(short, ((c.name, c.chunks) for c in others if may_evict(c)))
    if chosen is None:
        return None
    return Room(idle_rivals, ledger.named(chosen), rivals, missing)


def _in_the_way(
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

    def may_go() -> Iterable[Component]:
        others = (c for c in ledger.holders.to_give_way() if not _only_holder(c, owner))
        return (c for c in chain(ledger.idle, others) if c.name not in spare)

    names = policy.victims(short, ((c.name, c.chunks) for c in may_go()))
    going = [c for c in may_go() if c.chunks] if names is None else ledger.named(names)
    return going + [r for r in rivals if r.leases or r.name in ledger.idle]


def _only_holder(c: Component, agent: Agent) -> bool:
    return len(c.agents) == 1 and agent in c.agents
