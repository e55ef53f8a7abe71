"""How long a component stays that nobody holds, and which leave on their own. Pure."""

from collections.abc import Collection

from swapd.core.actions import Reason
from swapd.core.ledger import Ledger
from swapd.core.records import Component, State

#: A component whose owner comes back within this share of its swap-in time is busy: evicting it
#: between two uses would cost more than it gives.
BUSY_SHARE = 0.25


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
