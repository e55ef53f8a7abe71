"""Requests that need no memory: when they are granted at once, and before others. Pure.

A bounded number of requests whose components are all on the device or loading may overtake the head
of the queue, so that fewer components come and go, and nobody starves.
"""

from collections.abc import Iterable

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
from swapd.core.records import Component, Waiter
from swapd.core.states import State
from swapd.shared.protocol import NUMBER_MAX

#: The head is overtaken for at most this multiple of the time of its load.
OVERTAKEN_LOADS = 64


def at_once(ledger: Ledger, w: Waiter, asked: list[Component]) -> Refusal | bool:
    """Return the verdict on a request regardless of others: whether it needs no memory."""
    if ledger.down and (problem := cannot_come_in(ledger, asked, w)):
        return problem
    return may_share(ledger, w, asked) or never_fits(ledger, asked) or False


def may_share(ledger: Ledger, w: Waiter, asked: Iterable[Component]) -> bool:
    """Return whether `w` needs no memory and may go before earlier waiters. A request after an
    update must get the new bytes, so it shares no old ones. A late one joins no load."""
    enough = (State.RESIDENT,) if is_late(ledger, w) else (State.RESIDENT, State.LOADING)
    for c in asked:
        if c.state not in enough or c.unregistering:
            return False
        if c.superseded and must_leave_first(c, w):
            return False
    return all(may_join(ledger, c, w) for c in asked)


def may_join(ledger: Ledger, c: Component, w: Waiter) -> bool:
    """Return whether `w` may become a holder of `c` although others may wait for its memory."""
    return not is_closed(ledger, c) or may_overtake(ledger, w) or goes_on(ledger, c, w)


def is_closed(ledger: Ledger, c: Component) -> bool:
    """Return whether `c` is in the way of the head, or could leave instead: exact only once the
    head may not be overtaken, when it matters."""
    if c.name in ledger.in_the_way or ledger.closed_from is None:
        return True
    return c.chunks >= ledger.closed_from and c.policy != "permanent"


def may_overtake(ledger: Ledger, w: Waiter) -> bool:
    head = ledger.queue.head(ledger.now)
    if head is None or head is w or ledger.queue.outranks(w, head):
        return True
    return not is_bound_reached(ledger, head)


def is_bound_reached(ledger: Ledger, head: Waiter) -> bool:
    if head.bound is None or head.head_since is None:
        return False  # no decision has found it waiting yet
    return head.overtaken >= head.bound or ledger.now >= head.head_since + ledger.rules.turn_s


def bound(ledger: Ledger, head: Waiter, by: Iterable[Component]) -> int:
    """Return how many may overtake the head while the components `by` are in its way."""
    if head.due:
        return 0
    most = _most(ledger, head) if head.overtake is None else head.overtake
    rate = ledger.lane_in.bytes_per_s
    if not most or not rate:
        return most
    load_s = missing_chunks(ledger, ledger.named(head.names)) * ledger.chunk_bytes / rate
    return min(most, worth(load_s, usual_use_s(by)))


def _most(ledger: Ledger, head: Waiter) -> int:
    rules = ledger.rules
    if not rules.overtake_of:
        return rules.overtake
    names = {name for c in ledger.named(head.names) for name in (c.name, c.part_of, c.group)}
    return min([n for name, n in rules.overtake_of if name in names], default=rules.overtake)


def worth(load_s: float, use_s: float) -> int:
    """Return how many uses of `use_s` may go before a load of `load_s`. Each saves a load, but the
    head waits for all of them: at most a multiple of its load's time."""
    # a worker may report uses so short that the quotient is infinite
    return int(min(OVERTAKEN_LOADS * load_s / use_s, NUMBER_MAX)) if use_s else NUMBER_MAX


def usual_s(before_s: float, last_s: float) -> float:
    """`before_s` is 0 before the first use."""
    return (3 * before_s + last_s) / 4 if before_s else last_s


def goes_on(ledger: Ledger, c: Component, w: Waiter) -> bool:
    """Return whether `w` may share `c` because its holders may need that, or its turn goes on.

    An agent that holds `c` may: it could not release otherwise. The last agent that had `c` may
    within the minimum residency, if it is not queued. Another agent of a session that holds `c` may
    after a time: a holder may wait for it, which the daemon cannot see, or it is one of many with
    overlapping leases.
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
    """Return whether a grant of `asked` to `w` at once may matter to a waiter: one of them was
    idle, or its holders may be asked for it; or `w` must hurry, is the last to overtake the head,
    or may hold something that it waits for."""
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
    """Return whether a waiting agent may hold leases. What only this agent holds is not in its
    way."""
    return bool(ledger.queue.holding) or head.owner in ledger.holders.by_agent


def is_late(ledger: Ledger, w: Waiter) -> bool:
    """A late request may only have resident components: its deadline has passed, or is now."""
    return w.deadline is not None and w.deadline <= ledger.now
