"""The verdict on a request now: refused, shared, given room, or blocked. Pure; changes nothing.

Only this module decides that. `admission.py` and `planner.py` carry it out, `status.py` prints
it, `explain.py` words it.

`at_once(...)` finds requests that can never be granted, or need no memory. `room(...)` finds for
any other which components go so that its own can come in, or which are in its way.
"""

from collections.abc import Callable, Collection, Iterable
from itertools import chain
from typing import Literal, NamedTuple

from swapd.core import policy
from swapd.core.ledger import Ledger
from swapd.core.records import Agent, Component, Waiter
from swapd.core.states import State
from swapd.shared.protocol import Code

Why = Literal["down", "conflict", "too_large"]

#: The code of the refusal, by its reason.
CODES: dict[Why, Code] = {
    "down": "device_failed",
    "conflict": "conflict",
    "too_large": "too_large",
}

MayEvict = Callable[[Component], bool]


class Refused(NamedTuple):
    """It can never be granted. `of`: the components that are the cause."""

    why: Why
    of: list[Component]


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


Verdict = Refused | Shared | Room | Blocked


# --- at once -----------------------------------------------------------------------------


def at_once(ledger: Ledger, w: Waiter, asked: list[Component]) -> Refused | Shared | None:
    """The verdict on a request regardless of others; None: it needs memory."""
    if problem := cannot_come_in(ledger, asked, w):
        return problem
    return Shared() if may_share(ledger, w, asked) else never_fits(ledger, asked)


def may_share(ledger: Ledger, w: Waiter, asked: Iterable[Component]) -> bool:
    """Whether `w` needs no memory, and delays no request with a promise.

    A component that is wanted takes no new holders: overlapping leases would keep it for ever. An
    agent that holds it already may take it again, since it could not release otherwise. Another
    agent of the same session waits, but not for ever: a holder may wait for it, which the daemon
    cannot see, or it may be one of many with overlapping leases. An updated component takes no new
    holders either: a request that comes now must see the new bytes. A late request joins no load.
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
    """Whether `w` may have `c`, which is wanted, because its holders may need that to go on."""
    if w.owner in c.agents:
        return True
    return w.session in c.holders and c.closed_until <= ledger.now


def is_late(ledger: Ledger, w: Waiter) -> bool:
    """Whether it may only have resident components: its deadline has passed, or it is a try."""
    return w.deadline is not None and w.deadline <= ledger.now


def cannot_come_in(ledger: Ledger, asked: Iterable[Component], w: Waiter | None) -> Refused | None:
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


def to_let_go(ledger: Ledger, asked: Collection[Component]) -> list[Component]:
    """The pins beside which `asked` together could never come in, oldest first.

    None if they do not fit without pins either. A pin is a wish of an onlooker: no request is
    refused because of one.
    """
    short = sum(c.chunks for c in asked) + ledger.fixed_chunks(asked) - ledger.pool.total
    going = []
    for c in ledger.pinned.values():
        if short <= 0:
            break
        if c.only_pinned and c.fixed and c not in asked:
            going.append(c)
            short -= c.fixed
    return going if short <= 0 else []


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
       victims that `policy.victims` picks.

    `w` is None for a prefetch: no holder gives way to one, and no component goes for one of a
    `sequential` component, which would leave after use. `over`: only these go; None: any.
    """
    if leaving := [c for c in asked if leaves_first(c, w)]:  # 1
        return Blocked(leaving, [])
    rivals = ledger.rivals(asked)
    missing = missing_chunks(asked)
    if not rivals and missing <= ledger.pool.free:
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
    """Whether `c` has old bytes on the device that `w` may not have.

    An agent that holds it may take it again: it could not release otherwise.
    """
    if not c.superseded or w is None:
        return c.superseded
    if w.takes_old and w.session in c.holders:
        return False
    return w.owner not in c.agents


def missing_chunks(asked: Iterable[Component]) -> int:
    """Number of chunks to load for all of these to be in."""
    return sum(c.chunks for c in asked if c.state is State.ABSENT)


def stays_until(ledger: Ledger, c: Component) -> float:
    """Until when the minimum-residency rule keeps `c` though it is idle; a past time if it does
    not."""
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
    """The components that go so that `asked` can take `missing` chunks, or None if they cannot all
    go.

    `idle`: candidates for eviction, in the order in which they should go.
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
    """Components that must go to let `owner` have `asked`, and cannot now: idle ones, leased ones,
    rivals.

    An idle component that is wanted stays for the waiter. If it could be leased again meanwhile,
    two holders that take turns could keep out a waiter that needs both for ever.
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
