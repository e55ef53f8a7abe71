"""Waiters that may go before the head of the queue, because that does not delay its grant. Pure.

Backfill with a reservation, as batch schedulers do it: the head keeps its room, and who comes
after it may have what is left, for as long as it likes.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from swapd.core.ledger import Ledger
from swapd.core.records import Component, State, Waiter

#: Most waiters behind the head that one decision looks at, and most components of one of them and
#: of all leases: with more, nobody goes before the head.
LOOKED_AT = 16
NAMES_MAX = 64


def candidates(ledger: Ledger, head: Waiter) -> Iterator[Waiter]:
    """Waiters whose room delays no grant of `head`, whichever leases end first.

    Only those without leases: what others hold may be what `head` waits for. And only those whose
    components are out, and in no group: one that is in may have to go for `head`.
    """
    left = _left_beside(ledger, head)
    if left <= 0:
        return
    for w in islice(ledger.queue.queued, LOOKED_AT + 1):
        asked = _few(ledger, w)
        if w is head or not asked or w.owner in ledger.holders.by_agent:
            continue
        out = all(c.state is State.ABSENT for c in asked)
        if out and sum([c.chunks for c in asked]) <= left:
            yield w


def may_go(head: Waiter, c: Component) -> bool:
    """Whether an idle component may go for a candidate: not if `head` needs it."""
    return c.name not in head.names


def _few(ledger: Ledger, w: Waiter) -> list[Component]:
    """The components that `w` asked for; none, if they are many, or more than memory decides when
    one of them can come in."""
    asked = ledger.named(w.names) if len(w.names) <= NAMES_MAX else []
    bound = any(c.group is not None or c.superseded or c.unregistering for c in asked)
    return [] if bound else asked


def _left_beside(ledger: Ledger, head: Waiter) -> int:
    """The chunks that `head` leaves, in the tightest of all states in which it could be granted.

    It could be granted as soon as the leases that are left have at most `most` chunks. So the
    largest sum of some leases that is no greater than that is the tightest state.
    """
    pool, all_leased = ledger.pool, ledger.holders.leased
    asked = _few(ledger, head)
    if not asked or len(all_leased) > NAMES_MAX:
        return 0
    most = pool.total - ledger.fixed_chunks(asked) - sum([c.chunks for c in asked])
    if most < 0:
        return 0
    leased = [c for c in all_leased.values() if not c.fixed]
    # what is leaving, lent, or promised may be there at any grant, or any part of it
    coming_and_going = pool.total - pool.free - ledger.idle.chunks - ledger.fixed
    coming_and_going -= sum([c.chunks for c in leased])
    sums = _sums(c.chunks for c in leased if c.name not in head.names)
    sums = _with_any_part_of(sums, coming_and_going)
    reached = sums & ((1 << (most + 1)) - 1)
    return most - (reached.bit_length() - 1)


def _sums(parts: Iterable[int]) -> int:
    """The sums of all subsets: bit n is set if one of them is n."""
    sums = 1
    for part in parts:
        sums |= sums << part
    return sums


def _with_any_part_of(sums: int, whole: int) -> int:
    """Each of these sums with each number from 0 to `whole` added."""
    step = 1
    while whole > 0:
        sums |= sums << min(step, whole)
        whole -= step
        step *= 2
    return sums
