"""Leases, from the grant to the release; and the turn to start."""

from itertools import islice

from swapd.core import explain, prefetch, sharing, transfers
from swapd.core.actions import Grant, SendBroken, Waiting
from swapd.core.ledger import Ledger, observe
from swapd.core.queue import LOOKED_AT
from swapd.core.records import NOBODY, Agent, Component, Key, Lease, Session, Waiter
from swapd.core.requests import deadline
from swapd.shared.protocol import THE_START, AcquireStart, Placement, Release, UsedRanges


def lend(ledger: Ledger, w: Waiter) -> tuple[Placement, ...]:
    held = ledger.named(w.names)
    ledger.sessions[w.session].leases.add(w.request)
    if w.session not in ledger.notices.hurried:
        ledger.notices.unhurried[w.session] = None
    ledger.leases[w.key] = Lease(w.session, w.agent, dict.fromkeys(w.names), ledger.now)
    ledger.holders.open(w.key, ledger.leases[w.key])
    _note_turn(ledger, w.session, held)
    _foresee(ledger, held)
    if ledger.followers:
        prefetch.note_use(ledger, held)
    placements = []
    for c in held:
        c.promised.pop(w.key, None)
        if not c.leases:
            c.used_since, c.uses = ledger.now, 0
        c.uses += 1
        ledger.holders.take_up(c, w.key, w.owner)
        if c.name in ledger.notices.wanted:
            ledger.notices.joined[c.name] = None
        c.used, c.expected = True, False
        c.priority, c.last_agent = w.priority, hash(w.owner)
        ledger.expiries.drop(c.name)
        ledger.prefetches.pop(c.name, None)
        if c.session == w.session and not c.workspace:
            c.mapped = True
            c.dirty = c.mutable
            transient = c.policy == "sequential"
            placements.append(Placement(c.name, c.generation, c.runs, transient, c.contents))
    return tuple(placements)


def _foresee(ledger: Ledger, held: list[Component]) -> None:
    if ledger.rules.eviction == "lru":
        return
    chunks: dict[str, int] = {}
    for c in held:
        if c.policy == "lru" and not c.workspace:
            chunks[c.side] = chunks.get(c.side, 0) + c.chunks
    for name, size in chunks.items():
        ledger.foresight.use(name, size, ledger.room)


def _note_turn(ledger: Ledger, number: int, held: list[Component]) -> None:
    """Note the session's largest lease: it will need all of it together again."""
    own = [c for c in held if c.session == number and not c.workspace]
    session, chunks = ledger.sessions[number], sum([c.chunks for c in own])
    if chunks > session.turn_chunks:
        session.turn, session.turn_chunks = {c.name: None for c in own}, chunks


def is_replayed(ledger: Ledger, key: Key) -> bool:
    """Return whether the number of an acquire is in use, or its session is not open."""
    session = ledger.sessions.get(key[0])
    if session is None or key in ledger.starts:
        return True
    return key[1] in session.waiters or key[1] in session.leases


def note_use(ledger: Ledger, owner: Agent, holds: tuple[int, ...] | None) -> None:
    """Note that `owner` uses the leases of its session in `holds` and no others; None: all its own.
    Every later verdict depends on that.

    Its others go to NOBODY, which never waits: the client releases them on request, so they are no
    part of a deadlock and let `owner` share nothing.
    """
    if holds is None:
        return
    session, agent = owner
    in_use = {(session, number) for number in holds}
    held = ledger.holders.by_agent.get(owner)
    moves = [(key, NOBODY) for key in held.leases if key not in in_use] if held else []
    for key in in_use:
        lease = ledger.leases.get(key)
        if lease is not None and lease.agent != agent:
            moves.append((key, agent))
    for key, other in moves:
        lease = ledger.leases[key]
        ledger.holders.hand(key, lease, other, ledger.named(lease.names))
        ledger.replan |= ledger.somebody_waits


def take_back(
    ledger: Ledger,
    key: Key,
    again: int = 0,
    idle_s: float = 0.0,
    gap_s: float | None = None,
    *,
    unmapped: bool = False,
) -> None:
    """End a lease, if it exists. `again`: uses after the first. `idle_s`: seconds since the end of
    the last one. `gap_s`: seconds between that and the one before. `unmapped`: the worker has
    unmapped its clean components."""
    lease = ledger.leases.pop(key, None)
    if lease is None:
        return
    observe(ledger.counts.hold_s, ledger.now - lease.since)
    owner = lease.owner
    matters = gap_s is not None or _may_be_counted_on(ledger, owner)
    session = ledger.sessions.get(lease.session)
    for c in ledger.named(lease.names):
        ledger.holders.lay_down(c, key, owner)
        _note_uses(ledger, c, lease.since, again, idle_s)
        c.gap_s = c.gap_s if gap_s is None else gap_s
        if not c.leases:
            matters = True
            c.mapped &= c.mutable or not unmapped or c.session != lease.session
            _is_laid_down(ledger, c, lives=session is not None)
    ledger.holders.close(key, lease)
    if session is not None:
        _forget(ledger, session, key)
    ledger.replan |= matters and ledger.somebody_waits


def _forget(ledger: Ledger, session: Session, key: Key) -> None:
    session.leases.discard(key[1])
    if not session.leases:
        ledger.notices.unhurried.pop(key[0], None)


def _note_uses(ledger: Ledger, c: Component, since: float, again: int, idle_s: float) -> None:
    if again:
        ledger.count_hits(c, again)
        c.uses += again
    used_s = max(ledger.now - idle_s - since, 0.0) / (again + 1)
    c.hold_s, c.kept_on = sharing.usual_s(c.hold_s, used_s), again > 0
    c.last_used = max(ledger.now - idle_s, c.resident_since, c.last_used or 0.0)


def _may_be_counted_on(ledger: Ledger, owner: Agent) -> bool:
    """Return whether a waiter may be admitted when a lease of `owner` ends, although others still
    hold its components."""
    if (head := ledger.queue.head(ledger.now)) is None:
        return False
    first = islice(ledger.queue.queued, LOOKED_AT + 1)
    return sharing.holds_and_waits(ledger, head) or any(w.owner == owner for w in first)


def _is_laid_down(ledger: Ledger, c: Component, *, lives: bool) -> None:
    """Handle the end of its last lease. `lives`: the session still exists."""
    assert c.last_used is not None
    c.use_s = sharing.usual_s(c.use_s, max(c.last_used - c.used_since, 0.0) / c.uses)
    if lives:
        c.released_at = c.last_used  # the session may acquire it again
    if c.name in ledger.notices.wanted:
        ledger.replan = True  # perhaps no holder is left that could give it back
    transfers.settle(ledger, c)


def release(ledger: Ledger, session: int, asked: Release) -> None:
    for used in asked.used:
        _note_used(ledger, session, used)
    key, unmapped = (session, asked.lease), asked.unmapped
    take_back(ledger, key, asked.again, asked.idle_s, asked.gap_s, unmapped=unmapped)


def _note_used(ledger: Ledger, session: int, used: UsedRanges) -> None:
    """A save in flight is not changed by this."""
    c = ledger.components.get(used.name)
    if c is None or c.session != session or c.scratch != "saved" or not c.leases:
        return
    if used.number > c.used_number and (not used.ranges or sum(used.ranges[-1]) <= c.nbytes):
        c.used_number, c.to_save = used.number, used.ranges


def break_all(ledger: Ledger, c: Component, why: str) -> None:
    for session in sorted(c.holders):
        ledger.out.append(SendBroken(session, c.name, c.generation, why))
    if c.leases:
        take_from_all(ledger, c)
        c.last_used = ledger.now


def take_from_all(ledger: Ledger, c: Component) -> None:
    """The leases keep their other components."""
    for key in list(c.leases):
        lease = ledger.leases[key]
        del lease.names[c.name]
        ledger.holders.lay_down(c, key, lease.owner)


# --- the turn to start: one process at a time measures the free memory of the device -------------
# An engine sizes its caches by the free memory before its load and after its first pass. While
# another engine loads or borrows memory, that measurement means nothing.


def on_acquire_start(ledger: Ledger, key: Key, asked: AcquireStart) -> None:
    """Refuse a session with leases, as others would wait for both, the turn and these."""
    session, starts = key[0], ledger.starts
    if is_replayed(ledger, key):
        return ledger.refuse(key, "bad_request", explain.REPLAYED)
    if ledger.sessions[session].leases or any(other == session for other, _ in starts):
        return ledger.refuse(key, "conflict", explain.STARTS_WITH_NOTHING)
    starts[key] = ledger.now
    if len(starts) == 1:
        ledger.out.append(Grant(*key, (), 0.0, False))
    elif asked.timeout_s == 0.0:
        _refuse_late_start(ledger, key, tried=True)
    else:
        until = deadline(asked.timeout_s, ledger.now)
        if until is not None:
            ledger.start_deadlines.set(key, until)
        ledger.out.append(Waiting(*key, (THE_START,), explain.starting(ledger)))


def on_release(ledger: Ledger, key: Key, asked: Release) -> None:
    # without effect if the lease was released before, or its session is gone
    if not end_start(ledger, (key[0], asked.lease)):
        release(ledger, key[0], asked)


def end_start(ledger: Ledger, key: Key) -> bool:
    """Pass the turn on, too. Return whether there was such a request."""
    starts = ledger.starts
    if key not in starts:
        return False
    had_turn = next(iter(starts)) == key
    del starts[key]
    ledger.start_deadlines.drop(key)
    if had_turn and (following := next(iter(starts), None)) is not None:
        ledger.start_deadlines.drop(following)
        ledger.out.append(Grant(*following, (), ledger.now - starts[following], False))
    return True


def end_starts(ledger: Ledger, session: int) -> None:
    own = [key for key in ledger.starts if key[0] == session]
    for key in reversed(own):  # the one with the turn last: it must not pass to this session
        end_start(ledger, key)


def refuse_late_starts(ledger: Ledger) -> None:
    for key in ledger.start_deadlines.over(ledger.now):
        _refuse_late_start(ledger, key)


def refuse_waiting_starts(ledger: Ledger) -> None:
    """The session with the turn keeps it until it has started."""
    for key in list(ledger.starts)[1:]:
        end_start(ledger, key)
        ledger.refuse(key, "stopping", explain.STOPPING, names=())


def _refuse_late_start(ledger: Ledger, key: Key, *, tried: bool = False) -> None:
    why = f"the turn to start was not granted in time: {explain.starting(ledger)}"
    end_start(ledger, key)
    ledger.refuse(key, "timeout", why, tried=tried, names=())
