"""Decides which components leave to make room for a request. Pure; changes nothing.

`never_fits` and `cannot_come_in` find requests that can never be granted. For others, `room` says
which components leave or are in the way; `stays_until` and `goes_now` how long an unleased one
stays. The planner carries this out; `status.py` and `explain.py` describe it.
"""

from collections.abc import Callable, Collection, Iterable
from itertools import chain, takewhile
from typing import Literal, NamedTuple

from swapd.core import predictions, twins
from swapd.core.actions import Reason
from swapd.core.foresight import Candidate, going, needed, oldest, victims
from swapd.core.ledger import Ledger
from swapd.core.records import Agent, Component, Waiter
from swapd.core.states import State
from swapd.shared.protocol import Code

MayEvict = Callable[[Component], bool]


class Refusal(NamedTuple):
    """The request can never be granted, because of the components `of`."""

    why: Literal["down", "conflict", "too_large"]
    of: list[Component]

    @property
    def code(self) -> Code:
        return "device_failed" if self.why == "down" else self.why


class Room(NamedTuple):
    """The request can come in once `rivals` and `victims` have left. Rivals are other members of
    its alternating groups."""

    rivals: list[Component]
    victims: list[Component]
    #: All rivals on the device, also those that are leaving already.
    excluded: list[Component]


class Blocked(NamedTuple):
    """The request must wait, for its own components or for others."""

    #: Its own components that must leave before they come in anew.
    leaving: list[Component]
    #: Twins that its own components join once they are in.
    coming: list[Component]
    #: Components that must leave and cannot now: idle ones, leased ones, rivals.
    by: list[Component]

    @property
    def by_holders(self) -> bool:
        """Whether it waits for holders to give way, not for its own components or twins."""
        return not (self.leaving or self.coming)


# --- never -------------------------------------------------------------------------------


def cannot_come_in(ledger: Ledger, asked: Iterable[Component], w: Waiter | None) -> Refusal | None:
    """Refuse absent components while the device is down. `w` is None for a prefetch.

    One that is being saved counts as present, as the save will fail; an updated one as absent, as
    its new bytes cannot come in.
    """
    if not ledger.down:
        return None
    absent = [
        c
        for c in asked
        if (c.state is not State.RESIDENT and not (c.evicting and c.unsaved))
        or must_leave_first(c, w)
        if twins.to_join(ledger, c) is None
    ]
    return Refusal("down", absent) if absent else None


def never_fits(ledger: Ledger, asked: list[Component]) -> Refusal | None:
    """Refuse a request that would wait forever."""
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
    """Return which components leave so that `asked` can come in: all of them can, or none does.

    1. Those of `asked` that are leaving or were updated must have left, and a twin that comes in
    must be in. 2. Their rivals (other members of an alternating group) must be idle or leaving. 3.
    Free chunks, chunks about to be free, rivals and `victims` must be enough together.

    `w` is None for a prefetch of one component. No holder gives way to a prefetch, and nothing
    leaves for a `sequential` component. Only components in `over` may leave; None: any.
    """
    if (steps := steps_first(ledger, w, asked)) is not None:  # 1
        return steps
    rivals, missing = ledger.rivals(asked), missing_chunks(ledger, asked)
    if not rivals and missing <= ledger.pool.free:
        return Room([], [], rivals)
    if w is None and asked[0].policy == "sequential":
        return Blocked([], [], [])
    of_rivals = sum([r.chunks for r in rivals if not r.evicting])
    short = missing - ledger.pool.free - ledger.leaving - of_rivals
    going = _going(ledger, w, short, rivals, asked, may_evict, over)
    if going is not None:
        return Room(*going, rivals)
    if w is None:
        return Blocked([], [], [])
    return Blocked([], [], _in_the_way(ledger, w, asked, short, rivals))


def steps_first(ledger: Ledger, w: Waiter | None, asked: list[Component]) -> Blocked | None:
    """Return what must happen to `asked` and their twins first, however much room there is."""
    leaving = [c for c in asked if leaves_first(c, w)]
    coming = twins_coming(ledger, asked)
    return Blocked(leaving, coming, []) if leaving or coming else None


def _going(
    ledger: Ledger,
    w: Waiter | None,
    short: int,
    rivals: list[Component],
    asked: list[Component],
    may_evict: MayEvict,
    over: tuple[str, ...] | None,
) -> tuple[list[Component], list[Component]] | None:
    """Return the rivals to evict and the victims; None if a rival cannot leave or victims are too
    few."""
    staying = [r for r in rivals if not r.evicting]
    if short > ledger.idle.chunks or not _may_all_go(ledger, staying, may_evict):  # 2
        return None
    but = twins.needed(ledger, asked)
    but.update([r.name for r in staying])
    may_go = _idle(ledger, but, may_evict, over)
    if short > 0 and w is not None:
        may_go = _needed_last_first(ledger, short, may_go, asked)
    chosen = victims(short, may_go)  # 3
    return None if chosen is None else (staying, chosen)


def _may_all_go(ledger: Ledger, rivals: list[Component], may_evict: MayEvict) -> bool:
    return all(r.name in ledger.idle and may_evict(r) for r in rivals)


def _idle(
    ledger: Ledger, but: set[str], may_evict: MayEvict, over: tuple[str, ...] | None
) -> Iterable[Component]:
    idle = ledger.idle if over is None else ledger.idle.among(over)
    return (c for c in idle if c.name not in but and may_evict(c))


def _needed_last_first(
    ledger: Ledger, need: int, idle: Iterable[Component], asked: list[Component]
) -> Iterable[Component]:
    if ledger.foresight.rules:
        idle = _foreseen(ledger, need, list(idle), asked)
    return _used_up_first(ledger, idle, asked) if ledger.predicted else idle


def _foreseen(
    ledger: Ledger, need: int, idle: list[Component], asked: list[Component]
) -> Iterable[Component]:
    """Return idle components in the order in which they should leave for `asked`: those before all
    foreseen ones, then as the foresight chooses."""
    rest: dict[str, list[Component]] = {}
    first = list(takewhile(lambda c: not is_foreseen(c), idle))
    for c in filter(is_foreseen, idle):
        rest.setdefault(c.side, []).append(c)
    candidates = [Candidate(name, sum([c.chunks for c in of])) for name, of in rest.items()]
    expected = ledger.foresight.expected(ledger.room, dict.fromkeys(c.side for c in asked))
    need -= sum([c.chunks for c in first])
    chosen = [c for one in going(need, candidates, expected) for c in rest[one.name]]
    return dict.fromkeys([*first, *chosen, *idle])


def _used_up_first(
    ledger: Ledger, idle: Iterable[Component], asked: list[Component]
) -> Iterable[Component]:
    """Return `idle` with the parts first that the current use of their family has had already: what
    is loaded to follow the family is needed before these."""
    parts = {c.side for c in asked if c.part_of}
    acted = [f for f in ledger.predicted.values() if f.acted and f.after in parts]
    if not acted:
        return idle
    idle = list(idle)
    done = [c for c in idle if any(predictions.is_used_up(f, c) for f in acted)]
    return dict.fromkeys([*done, *idle])


def is_foreseen(c: Component) -> bool:
    """Return whether the foresight decides when it leaves."""
    return c.policy == "lru" and not (
        c.workspace or c.leaves_for_nothing or c.state is State.LOADING
    )


def leaves_first(c: Component, w: Waiter | None) -> bool:
    """Return whether `c` must leave, or is leaving, before it comes in anew for `w`."""
    return c.evicting or (c.superseded and must_leave_first(c, w))


def twins_coming(ledger: Ledger, asked: list[Component]) -> list[Component]:
    if not ledger.alike:
        return []
    absent = (c for c in asked if c.state is State.ABSENT)
    return [twin for c in absent if (twin := twins.to_await(ledger, c)) is not None]


def must_leave_first(c: Component, w: Waiter | None) -> bool:
    """Return whether `c` has old bytes on the device that `w` may not have. An agent that holds `c`
    may take them again: it could not release otherwise."""
    if not c.superseded or w is None:
        return c.superseded
    if w.takes_old and w.session in c.holders:
        return False
    return w.owner not in c.agents


def fits_in(ledger: Ledger, asked: list[Component], chunks: int) -> bool:
    missing = missing_chunks(ledger, asked)
    return are_out(asked) and not ledger.rivals(asked) and missing <= chunks


def may_come_in(ledger: Ledger, asked: list[Component]) -> bool:
    """Return whether all are off the device, and may come in though no holder gives way."""
    return are_out(asked) and missing_chunks(ledger, asked) <= may_free(ledger)


def may_free(ledger: Ledger) -> int:
    return ledger.pool.free + ledger.leaving + ledger.idle.chunks


def are_out(asked: Iterable[Component]) -> bool:
    return all([c.state is State.ABSENT for c in asked])


def missing_chunks(ledger: Ledger, asked: Iterable[Component]) -> int:
    if not ledger.alike:
        return sum([c.chunks for c in asked if c.state is State.ABSENT])
    absent = (c for c in asked if c.state is State.ABSENT)
    return sum([c.chunks for c in absent if twins.to_join(ledger, c) is None])


def _in_the_way(
    ledger: Ledger, w: Waiter, asked: list[Component], short: int, rivals: list[Component]
) -> list[Component]:
    """Return the components that must leave for `asked` and cannot now. Idle ones among them stay
    for the waiter: otherwise two holders that take turns could for ever keep out a waiter that
    needs both."""
    spare = twins.needed(ledger, asked)
    spare.update([r.name for r in rivals])
    others = chain(ledger.idle, _leased_beside(ledger, w.owner), _promised(ledger))
    chosen, short = oldest(short, (c for c in others if c.name not in spare))
    going = needed(chosen, short)
    going += twins.leased_beside(ledger, going)
    return going + [r for r in rivals if r.leases or r.name in ledger.idle]


def _leased_beside(ledger: Ledger, agent: Agent) -> Iterable[Component]:
    for c in ledger.holders.to_give_way():
        if len(c.agents) > 1 or agent not in c.agents:
            yield c


def _promised(ledger: Ledger) -> Iterable[Component]:
    for move in ledger.moves.values():
        c = move.component
        if c.state is State.LOADING and c.promised and not c.leases and ledger.is_current(c):
            yield c


# --- how long a component stays ---------------------------------------------------------


#: A component is busy if its owner comes back within this share of its swap-in time: an eviction
#: between two uses would cost more than it gives.
BUSY_SHARE = 0.25
#: Or within this share of the usual use of what would come in: the owner's next use would wait for
#: all of that use.
BUSY_SHARE_OF_USE = 0.125


def goes_now(c: Component, *, down: bool, joined: bool) -> Reason | None:
    """Return why an unleased component leaves on its own; None if it stays.

    An unregistered or updated one leaves, and one that is `joined` with a twin, which keeps the
    bytes in. A `sequential` one leaves after its use, and a part when its family no longer keeps
    it, unless a request waits for it, or the device is `down` and it could not come back.
    """
    if c.unregistering:
        return "unregister"
    if c.superseded:
        return "update"
    if joined:
        return "joined"
    if c.waiting or down or c.policy != "sequential":
        return None
    if c.kept_no_more:
        return "resized"
    return "sequential" if c.used else None


def may_go_for(expected: Component, c: Component, over: Collection[str] | None) -> bool:
    """Return whether idle `c` may be evicted to load `expected` ahead of its acquire: only if it is
    in `over` (None: any). Not another expected component, as the two would push each other out, nor
    a part of the same family, which is needed too."""
    if c.expected or (c.part_of and c.part_of == expected.part_of):
        return False
    return over is None or c.name in over or c.part_of in over


def usual_use_s(asked: Iterable[Component]) -> float:
    return max([c.use_s for c in asked], default=0.0)


def quantum_s(ledger: Ledger, c: Component, priority: int, use_s: float) -> float:
    """Return the minimum residency of `c`, in seconds, against an acquire of this `priority` whose
    components are used for `use_s`.

    It is a multiple of the swap-in time; or `use_s` less a multiple of the owner's pause, if that
    is longer. It is bounded, so that no waiter starves, and 0 against a priority above that of the
    last lease.
    """
    if priority > c.priority:
        return 0.0
    rules = ledger.rules
    least_s = rules.residency_factor * (c.swap_in_s or 0.0)
    if rules.residency_factor and c.gap_s is not None:
        least_s = max(least_s, use_s - c.gap_s / BUSY_SHARE_OF_USE)
    return min(least_s, rules.residency_bound_s, rules.turn_s)


def stays_until(
    ledger: Ledger, c: Component, priority: int, use_s: float, idle_since: float | None = None
) -> float:
    """Return until when idle `c` stays against an acquire of this `priority` whose components are
    used for `use_s`. `idle_since`: when it becomes idle, if it is not yet.

    A busy component stays for its minimum residency, unless its owner fails to come back. `gap_s`
    goes on through an eviction, so two decode loops that evict each other's components both count
    as busy.
    """
    since = c.idle_since if idle_since is None else idle_since
    if c.state is State.LOADING or c.gap_s is None:
        return since
    swap_s = BUSY_SHARE * (c.swap_in_s or 0.0)
    if c.gap_s >= max(swap_s, BUSY_SHARE_OF_USE * use_s):
        return since
    over = c.resident_since + quantum_s(ledger, c, priority, use_s)
    return min(over, since + 2 * max(swap_s, c.gap_s))
