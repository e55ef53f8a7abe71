"""The replies to status and forecast. Changes nothing.

A forecast is the verdict of `eviction.py` for a waiter outside the queue. Unless something happens
in between, the acquire does the same.
"""

from collections.abc import Iterable
from functools import partial
from heapq import nsmallest
from itertools import islice

from swapd.core import eta, eviction, explain, sharing, twins
from swapd.core.actions import Urgency
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Transfer, Waiter
from swapd.core.residency import Residency
from swapd.core.sessions import LIFELINE, REPLIES
from swapd.core.states import State
from swapd.shared.protocol import (
    NAMES_SHOWN,
    WAITS_SHOWN,
    WASTED_LAST,
    Blocker,
    ComponentStatus,
    CopyStatus,
    Forecast,
    ForecastRequest,
    KeptStatus,
    Refused,
    SessionStatus,
    Victim,
    WaitStatus,
    WastedLoads,
)
from swapd.shared.units import measured_loads, seconds


def component_status(ledger: Ledger, c: Component, now: float) -> ComponentStatus:
    return ComponentStatus(
        name=c.name,
        session=c.session,
        nbytes=c.nbytes,
        state=_state(ledger, c),
        policy=c.policy,
        group=c.group,
        mutable=c.mutable,
        leases=len(c.leases),
        holders=explain.holders(ledger, c),
        idle_s=None if c.leases or c.last_used is None else now - c.last_used,
        loads=c.loads,
        evictions=c.evictions,
        hits=c.hits,
        swap_in_s=c.swap_in_s,
        copy_s=c.copy_s,
        part_of=c.part_of,
        kind=c.kind,
        pinned=c.pinned,
        wasted=c.wasted,
        twins=ledger.host.contents.origin(c.uid),
    )


_OF_A_WORKSPACE = {State.ABSENT: "waiting", State.LOADING: "lending", State.RESIDENT: "lent"}


def _state(ledger: Ledger, c: Component) -> str:
    if c.workspace:
        return _OF_A_WORKSPACE.get(c.state, c.state.value)
    if c.state is State.RESIDENT and c.leases:
        return "leased"
    return "idle" if c.state is State.RESIDENT and c.name in ledger.idle else c.state.value


def session_status(ledger: Ledger, session: int) -> SessionStatus:
    known = ledger.sessions[session]
    stays = sum(c.chunks for c in ledger.named(known.owns) if c.stays)
    turn = sum(c.chunks for c in ledger.named(known.turn) if not c.stays)
    return SessionStatus(
        session,
        known.label,
        len(known.leases),
        len(known.waiters),
        unread=any((session, what) in ledger.debts for what in (LIFELINE, REPLIES)),
        stays_bytes=stays * ledger.chunk_bytes,
        turn_bytes=turn * ledger.chunk_bytes,
    )


def wasted(ledger: Ledger, now: float) -> WastedLoads | None:
    """None before there were enough wasted loads."""
    if len(ledger.wasted) < WASTED_LAST:
        return None
    (first, _, hits, busy_s), (last, _, hits_then, busy_then_s) = (
        ledger.wasted[0],
        ledger.wasted[-1],
    )
    return WastedLoads(now - last, last - first, busy_then_s - busy_s, hits_then - hits)


def kept(ledger: Ledger) -> tuple[KeptStatus, ...]:
    owners = (ledger.host.owners[uid] for uid in ledger.host.kept)
    return tuple(KeptStatus(c.name, c.content, c.nbytes) for c in owners)


def waits(core: Residency, now: float) -> tuple[WaitStatus, ...]:
    etas = {w.key: found for w, found in eta.etas(core.ledger, now)}
    return tuple(
        WaitStatus(
            w.session,
            w.asked[:NAMES_SHOWN],
            len(w.asked),
            now - w.arrived,
            w.why,
            (found := etas.get(w.key, eta.PARKED if w.parked else eta.MANY)).known_s,
            found.unknown,
        )
        for w in islice(core.ledger.queue, WAITS_SHOWN)
    )


def copies(ledger: Ledger, now: float) -> tuple[CopyStatus, ...]:
    found: list[CopyStatus] = []
    busy = set()
    moving = [move for move in ledger.moves.values() if move.lane is not None]
    for move in nsmallest(WAITS_SHOWN, moving, key=partial(_rank_of, ledger)):
        assert move.lane is not None
        c, coming = move.component, move.lane is ledger.lane_in
        since = now - max(move.began, move.lane.ended_at)
        found.append(
            CopyStatus(
                c.name,
                "in" if coming else "out",
                c.bytes_in if coming else c.bytes_back,
                None if coming in busy else since,
                move.lane.bytes_per_s,
            )
        )
        busy.add(coming)
    return tuple(found)


def _rank_of(ledger: Ledger, move: Transfer) -> Urgency:
    return move.component.urgency if move.lane is ledger.lane_in else (-1, 0, 0)


#: No thread or task has this number, so this agent holds nothing.
_NOBODY = -1
#: Later than all waiters.
_LAST = 1 << 62
#: Most waiters at the head of the queue that a forecast names.
_NAMED = 3


def forecast(
    core: Residency, asked: ForecastRequest, session: int, now: float
) -> Forecast | Refused:
    """Return the reply, or the refusal that the acquire would get."""
    ledger = core.ledger
    if ledger.stopping:
        return Refused(asked.id, "stopping", explain.STOPPING)
    if asked.acquire is not None:
        return _of_waiting(core, asked, session, now)
    names = ledger.expand(asked.names)
    for name in names:
        if not ledger.may_be_acquired(name):
            return Refused(asked.id, "unknown_component", explain.unknown(ledger, name))
    components = ledger.named(names)
    w = Waiter(session, asked.id, _NOBODY, asked.names, names, 0, None, now, _LAST)
    found = sharing.at_once(ledger, w, components)
    if isinstance(found, eviction.Refusal):
        return Refused(asked.id, found.code, explain.refused(ledger, found))
    w.queued = not found
    victims, waits = _room(core, w, components, now) if w.queued else ([], [])
    return _reply(ledger, asked.id, w, victims, waits, now)


def _of_waiting(
    core: Residency, asked: ForecastRequest, session: int, now: float
) -> Forecast | Refused:
    ledger = core.ledger
    w = ledger.queue.get((session, asked.acquire or 0))
    if w is None:
        return Refused(asked.id, "bad_request", explain.WAITS_NO_MORE)
    if w.parked:
        missing = [n for n in w.names if not ledger.may_be_acquired(n)]
        parked = [Blocker(n, "not registered yet") for n in missing[:NAMES_SHOWN]]
        return _reply(ledger, asked.id, w, [], parked, now)
    victims, waits = _room(core, w, ledger.named(w.names), now) if w.queued else ([], [])
    return _reply(ledger, asked.id, w, victims, waits, now)


def _room(
    core: Residency, w: Waiter, asked: list[Component], now: float
) -> tuple[list[Victim], list[Blocker]]:
    """Return what would be evicted at once; otherwise what the acquire would wait for."""
    ledger = core.ledger
    first = [o for o in core.ledger.queue.queued if o.order < w.order]
    if first:
        return [], [_first(ledger, o) for o in islice(first, _NAMED)]

    use_s = eviction.usual_use_s(asked)

    def may_evict(c: Component) -> bool:
        return eviction.stays_until(ledger, c, w.priority, use_s) <= now

    found = eviction.room(ledger, w, asked, may_evict)
    if isinstance(found, eviction.Blocked):
        if not found.by_holders:
            return [], list(dict.fromkeys(_comes_by_itself(found)))
        return [], list(dict.fromkeys(_blocking(ledger, w, asked, found.by, now)))
    victims = [_victim(c, "alternating") for c in found.rivals]
    return victims + [_victim(c, "room") for c in found.victims], []


def _victim(c: Component, reason: str) -> Victim:
    return Victim(c.name, c.nbytes, c.bytes_back, reason, c.part_of)


def _comes_by_itself(found: eviction.Blocked) -> Iterable[Blocker]:
    for c in found.leaving:
        yield Blocker(_known_as(c), "leaving; it can be loaded again when it has left")
    for twin in found.coming:
        yield Blocker(_known_as(twin), "coming in, with the same bytes")


def _known_as(c: Component) -> str:
    """Name the family for a part: its parts are in the way together."""
    return c.part_of or explain.called(c)


def _first(ledger: Ledger, w: Waiter) -> Blocker:
    why = f"{explain.who(ledger, w.session)} waits for it, and is ahead in the queue"
    return Blocker(explain.asked_for(ledger, w), why)


def _blocking(
    ledger: Ledger, w: Waiter, asked: list[Component], going: list[Component], now: float
) -> Iterable[Blocker]:
    use_s = eviction.usual_use_s(asked)
    for c in going:
        if c.leases:
            yield Blocker(_known_as(c), f"leased by {', '.join(explain.holders(ledger, c))}")
        elif c.promised:
            yield _promised(ledger, c)
        elif (until := eviction.stays_until(ledger, c, w.priority, use_s)) > now:
            why = f"in use a moment ago, and kept for another {seconds(until - now)}"
            yield Blocker(_known_as(c), why)
    for c in ledger.components.values():
        if c.promised and c not in asked and c not in going:
            yield _promised(ledger, c)


def _promised(ledger: Ledger, c: Component) -> Blocker:
    sessions = ", ".join(explain.who(ledger, s) for s in sorted({s for s, _ in c.promised}))
    return Blocker(_known_as(c), f"coming in for {sessions}")


def _is_loaded_for(ledger: Ledger, c: Component, w: Waiter) -> bool:
    comes_in = c.state is State.ABSENT or eviction.leaves_first(c, w)
    return comes_in and twins.to_join(ledger, c) is None


def _reply(
    ledger: Ledger,
    number: int,
    w: Waiter,
    victims: list[Victim],
    waits: list[Blocker],
    now: float,
) -> Forecast:
    asked = [] if w.parked else ledger.named(w.names)
    loads = [c for c in asked if _is_loaded_for(ledger, c, w)]
    measured = measured_loads(ledger.components.values())
    found = eta.eta(ledger, w, now)
    return Forecast(
        id=number,
        names=w.names,
        bytes_in=sum(map(eta.bytes_in, loads)),
        bytes_coming=sum(c.bytes_in for c in asked if c.state is State.LOADING),
        bytes_back=sum(v.bytes_back for v in victims),
        victims=tuple(victims),
        waits_for=tuple(waits),
        seconds=found.known_s,
        bytes_per_s=measured and measured[0],
        unknown=found.unknown,
    )
