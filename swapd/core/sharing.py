"""Requests that need no memory: which may be granted at once, and before others. Pure.

The first that waits for memory, the head of the queue, is overtaken by a bounded number of requests
whose components are all in, or coming. So fewer components come and go, and nobody starves.
"""

from collections.abc import Iterable
from typing import NamedTuple

from swapd.core.eviction import (
    Refusal,
    cannot_come_in,
    missing_chunks,
    must_leave_first,
    never_fits,
    quantum_s,
    usual_use_s,
)
from swapd.core.ledger import Ledger
from swapd.core.records import Component, State, Waiter
from swapd.shared.protocol import NUMBER_MAX

#: Others overtake the head of the queue for this multiple of the time of its load at most.
OVERTAKEN_LOADS = 64


class Shared(NamedTuple):
    """All its components are in, or loading: it needs no memory."""


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
    return not is_closed(ledger, c) or may_overtake(ledger, w) or goes_on(ledger, c, w)


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
    if head.due:
        return 0
    most = ledger.rules.overtake if head.overtake is None else head.overtake
    rate = ledger.lane_in.bytes_per_s
    if not most or not rate:
        return most
    load_s = missing_chunks(ledger.named(head.names)) * ledger.chunk_bytes / rate
    return min(most, worth(load_s, usual_use_s(by)))


def worth(load_s: float, use_s: float) -> int:
    """How many uses of `use_s` may go before one that needs a load of `load_s`.

    They save loads, and it waits for all of them: no longer than a multiple of its load's time.
    """
    return int(OVERTAKEN_LOADS * load_s / use_s) if use_s else NUMBER_MAX


def usual_s(before_s: float, last_s: float) -> float:
    """The usual time of a use after one of `last_s`; `before_s`: 0 if this was the first."""
    return (3 * before_s + last_s) / 4 if before_s else last_s


def goes_on(ledger: Ledger, c: Component, w: Waiter) -> bool:
    """Whether the holders of `c` may need `w` to have it, or it is their turn.

    An agent that holds it could not release otherwise. And the last one that had it goes on within
    the minimum residency, if it comes back for it: once it is queued it waits as others do. Another
    one of a session that holds what is in the way waits, but not for ever: a holder may wait for
    it, which the daemon cannot see, or it may be one of many with overlapping leases.
    """
    if w.owner in c.agents:
        return True
    comes_back = not w.queued and hash(w.owner) == c.last_agent
    if comes_back and c.name not in ledger.notices.wanted:
        head = ledger.queue.head(ledger.now)
        use_s = usual_use_s(ledger.named(head.names)) if head else 0.0
        return ledger.now < c.resident_since + quantum_s(ledger, c, c.priority, use_s)
    is_open = c.name in ledger.in_the_way and c.closed_until <= ledger.now
    return is_open and w.session in c.holders


def is_missed(ledger: Ledger, w: Waiter, asked: list[Component]) -> bool:
    """Whether somebody that waits fares worse, or hears of it, if `w` is granted `asked` at once.

    One of them had no holder, or its holders are asked for it, or may be from now on; `w` is one
    more to hurry, the last to overtake the head, or a holder beside one that waits.
    """
    notices, head = ledger.notices, ledger.queue.head(ledger.now)
    for c in asked:
        if not c.leases or c.name in notices.wanted or c.priority > w.priority:
            return True
    if head is None:
        return False
    last = head.bound is not None and head.overtaken + 1 >= head.bound
    hurries = bool(notices.hurried) and w.session not in notices.hurried
    return last or hurries or holds_and_waits(ledger, head)


def holds_and_waits(ledger: Ledger, head: Waiter) -> bool:
    """Whether an agent may hold components and wait: what it alone holds is not in its way."""
    return bool(ledger.queue.holding) or head.owner in ledger.holders.by_agent


def is_late(ledger: Ledger, w: Waiter) -> bool:
    """Whether it may only have resident components: its deadline has passed, or it is a try."""
    return w.deadline is not None and w.deadline <= ledger.now
