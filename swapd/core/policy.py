"""Which components to evict, and when one may be. Pure choices; no state.

Only this module and `verdict.room` decide evictions.
"""

from collections.abc import Collection, Iterable, Sequence, Set

import msgspec

from swapd.core.actions import Reason
from swapd.core.records import Component


class Rules(msgspec.Struct, frozen=True):
    """Rules of all decisions: the user may set all but the last. Times in seconds."""

    strict: bool = False  # wait for the worker's acknowledgement before chunks are reused
    ack_timeout_s: float = 60.0
    residency_factor: float = 8.0  # minimum residency, in multiples of the swap-in time
    residency_bound_s: float = 2.0  # its upper bound, so that no waiter starves
    patience_s: float = 30.0  # a waiter that waited longer goes first, at any priority
    unread_timeout_s: float = 60.0  # longest time in which a session reads none of these messages


#: A component whose owner comes back within this share of its swap-in time is busy: evicting it
#: between two uses would cost more than it gives.
BUSY_SHARE = 0.25

#: While a component is wanted, other agents of the sessions that hold it get no new leases of it
#: for this long at first, and twice as long each next time: see `verdict.may_share`.
CLOSED_S = 0.25

#: A session that fills bytes that others share may take this long, plus the time that a slow disk
#: takes for them.
SHARE_PATIENCE_S = 30.0
SLOWEST_BYTES_PER_S = 100e6


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


def share_patience_s(nbytes: int) -> float:
    """How long a component waits for another that fills the same bytes before it fills its own."""
    return SHARE_PATIENCE_S + nbytes / SLOWEST_BYTES_PER_S


def victims(need: int, idle: Iterable[tuple[str, int]]) -> list[str] | None:
    """Name the components to evict to free `need` chunks, or None if all are too few.

    `idle` is (name, chunks), in the order in which they should go. Every component named is
    necessary: oldest first alone would take too many (need 10 with idle a=1, b=10 would name both),
    so the most recent superfluous ones stay.
    """
    chosen: list[tuple[str, int]] = []
    short = need
    for name, chunks in idle:
        if short <= 0:
            break
        if chunks:
            chosen.append((name, chunks))
            short -= chunks
    if short > 0:
        return None
    kept: list[str] = []
    for name, chunks in reversed(chosen):
        if short + chunks <= 0:
            short += chunks
        else:
            kept.append(name)
    return kept[::-1]


def eviction_order(idle: Sequence[tuple[str, str]], in_use: Set[str]) -> list[str]:
    """The names of `idle` components in the order in which they should go.

    `idle` is (name, family or ""), least recently used first; `in_use` are families with a part in
    use. A family is as recent as its most recent part. Within it, the most recent part goes first:
    passes are cyclic, so that part is needed last. Evicting the least recent part would push out
    the one that is needed next.
    """
    position = {family: i for i, (_, family) in enumerate(idle) if family}
    position.update({family: position[family] + len(idle) for family in in_use & position.keys()})
    ranked = [
        (position[family] if family else i, -i if family else 0, name)
        for i, (name, family) in enumerate(idle)
    ]
    return [name for _, _, name in sorted(ranked)]


def spread(sizes: Sequence[int], room: int) -> set[int]:
    """Which of the parts of `sizes`, by number, to keep in `room`: as many as fit, evenly spread.

    Then equally many parts are copied between any two kept ones, and their copies have the time in
    between.
    """
    fit = left = 0
    for size in sorted(sizes):  # no choice has more parts than this
        left += size
        fit += left <= room
    for n in range(fit, 0, -1):
        chosen = {(2 * i + 1) * len(sizes) // (2 * n) for i in range(n)}
        if sum(sizes[i] for i in chosen) <= room:
            return chosen
    return set()


def room_to_keep(sizes: Sequence[int], room: int, beside: int) -> int:
    """How much of `room` the parts of `sizes` may keep: all of it if they all fit. Else `beside` of
    the largest parts need room as well: one in use, and others that load."""
    return room if sum(sizes) <= room else room - beside * max(sizes, default=0)


def quantum_s(swap_in_s: float, factor: float, bound_s: float) -> float:
    """How long a component stays once it is in, seconds: a multiple of its swap-in time."""
    return min(factor * swap_in_s, bound_s)


def is_busy(gap_s: float | None, swap_in_s: float) -> bool:
    """Whether the owner keeps using it: its last acquire came soon after the release.

    `gap_s` is the time from a release to the next acquire, also if the component was evicted in
    between. So two decode loops that evict each other's components both count as busy.
    """
    return gap_s is not None and gap_s < BUSY_SHARE * swap_in_s


def protected_until(
    *,
    resident_since: float,
    idle_since: float,
    swap_in_s: float,
    gap_s: float | None,
    factor: float,
    bound_s: float,
) -> float:
    """Until when an idle component may not be evicted; a time in the past if it may be now.

    The minimum-residency rule: a busy component stays for its quantum, unless its owner fails to
    come back. `bound_s` bounds the quantum, so no waiter starves.
    """
    if not is_busy(gap_s, swap_in_s):
        return idle_since
    return min(
        resident_since + quantum_s(swap_in_s, factor, bound_s),
        idle_since + 2 * BUSY_SHARE * swap_in_s,
    )
