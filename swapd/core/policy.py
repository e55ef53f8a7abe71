"""Which components to evict, and when one may be. Pure choices; no state.

Eviction is decided here and in `verdict.room`, and nowhere else.
"""

from collections.abc import Collection, Iterable, Sequence, Set

import msgspec

from swapd.core.actions import Reason
from swapd.core.records import Component


class Rules(msgspec.Struct, frozen=True):
    """What decisions go by: the user may set all but the last. Times in seconds."""

    strict: bool = False  # wait for the worker's acknowledgement before chunks are reused
    ack_timeout_s: float = 60.0
    residency_factor: float = 8.0  # minimum residency, in multiples of the swap-in time
    residency_bound_s: float = 2.0  # and its upper bound, so that nobody starves
    patience_s: float = 30.0  # who waited longer goes first, whatever its priority
    unread_timeout_s: float = 60.0  # so long a session may take none of what it must hear


#: A component whose owner comes back within this share of its swap-in time is busy:
#: evicting it between two uses would cost more than it gives.
BUSY_SHARE = 0.25

#: While a component is wanted, other agents of the sessions that hold it get no more leases of it
#: for so long at first, and for twice as long each time after that: see `verdict.may_share`.
CLOSED_S = 0.25

#: One that fills what others are to share may take so long, and as much longer as a slow disk does.
SHARE_PATIENCE_S = 30.0
SLOWEST_BYTES_PER_S = 100e6


def goes_now(c: Component, *, down: bool) -> Reason | None:
    """Why a component that nobody holds leaves without being asked, or None if it stays.

    One that is unregistered, or was updated, in any case. One that passes through once it was used,
    and one that is kept no more, unless somebody waits for it, or the device is `down`: then it
    could not come back.
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
    """Whether `c`, which is idle, may be evicted so that `expected` is in before it is asked for.

    Only what `over` names, unless that is None. Not what is expected as well: the two would push
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

    `idle` is (name, chunks), those that should go first first. Every one named is needed: oldest
    first alone would take too much (need 10 with idle a=1, b=10 would give both), so the
    warmest that turn out superfluous are spared.
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

    `idle` is (name, family or ""), least recently used first; `in_use` are families of which a
    part is used now. A family was used when the last of its parts was. Its parts are used one
    after the other, over and over: the one that was used last is needed last, and goes first.
    Were it the least recently used, each that comes in would push out the one that is needed next.
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

    So between two that are kept there are as many to be copied as anywhere else, and the copies
    have the time of those between them.
    """
    fit = left = 0
    for size in sorted(sizes):  # no more than this many do, however they are chosen
        left += size
        fit += left <= room
    for n in range(fit, 0, -1):
        chosen = {(2 * i + 1) * len(sizes) // (2 * n) for i in range(n)}
        if sum(sizes[i] for i in chosen) <= room:
            return chosen
    return set()


def room_to_keep(sizes: Sequence[int], room: int, beside: int) -> int:
    """How much of `room` parts of `sizes` may keep: all of it if they all fit. Else so many of the
    largest must have room `beside` them: one in use, and others on their way."""
    return room if sum(sizes) <= room else room - beside * max(sizes, default=0)


def quantum_s(swap_in_s: float, factor: float, bound_s: float) -> float:
    """How long a component stays once it is in, seconds: a multiple of its swap-in time."""
    return min(factor * swap_in_s, bound_s)


def is_busy(gap_s: float | None, swap_in_s: float) -> bool:
    """Whether the owner keeps using it: its last return came at once.

    `gap_s` is the time from a release to the next acquire, also when the component had
    been evicted in between: so two decode loops that ping-pong are seen for what they are.
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
    """Until when an idle component may not be evicted; in the past if it may be now.

    The minimum-residency rule: a busy one stays for its quantum, unless its owner fails
    to come back. `bound_s` bounds the quantum, so nobody starves.
    """
    if not is_busy(gap_s, swap_in_s):
        return idle_since
    return min(
        resident_since + quantum_s(swap_in_s, factor, bound_s),
        idle_since + 2 * BUSY_SHARE * swap_in_s,
    )
