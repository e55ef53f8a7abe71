"""How long a component stays that nobody holds, and which leave on their own. Pure."""

from collections.abc import Collection, Iterable

from swapd.core.actions import Reason
from swapd.core.ledger import Ledger
from swapd.core.records import Component, State

#: A component whose owner comes back within this share of its swap-in time is busy: evicting it
#: between two uses would cost more than it gives.
BUSY_SHARE = 0.25
#: And so is one whose owner comes back within this share of the usual use of what would come in for
#: it: its next use would wait for all of that.
BUSY_SHARE_OF_USE = 0.125


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


def usual_use_s(asked: Iterable[Component]) -> float:
    """The usual time of a use of these together; 0 if there was none."""
    return max([c.use_s for c in asked], default=0.0)


def quantum_s(ledger: Ledger, c: Component, priority: int, use_s: float) -> float:
    """How long a component stays once it is in, seconds, for an acquire of this `priority` whose
    components are in use for `use_s`.

    A multiple of its swap-in time, or the time that the other has in its turn: less, the longer its
    own owner is away between two uses. Within a bound, so that no waiter starves; and not at all
    for a higher priority than that of its last lease.
    """
    if priority > c.priority:
        return 0.0
    rules = ledger.rules
    least_s = rules.residency_factor * (c.swap_in_s or 0.0)
    if rules.residency_factor and c.gap_s is not None:
        least_s = max(least_s, use_s - c.gap_s / BUSY_SHARE_OF_USE)
    return min(least_s, rules.residency_bound_s, rules.turn_s)


def stays_until(ledger: Ledger, c: Component, priority: int, use_s: float) -> float:
    """Until when an idle component may not be evicted for an acquire of this priority, whose
    components are in use for `use_s`; a time in the past if it may be now.

    The minimum-residency rule: a busy component stays for its quantum, unless its owner fails to
    come back. `gap_s` is the time from a release to the next acquire, also if the component was
    evicted in between. So two decode loops that evict each other's components both count as busy.
    """
    if c.state is State.LOADING or c.gap_s is None:
        return c.idle_since
    swap_s = BUSY_SHARE * (c.swap_in_s or 0.0)
    if c.gap_s >= max(swap_s, BUSY_SHARE_OF_USE * use_s):
        return c.idle_since
    over = c.resident_since + quantum_s(ledger, c, priority, use_s)
    return min(over, c.idle_since + 2 * max(swap_s, c.gap_s))
