"""Sessions: opened, late with a debt, ended; the rules and the time that they live by.

What a session leaves behind when it goes: its components, its copies in flight, and the chunks to
which its process may still write.
"""

from itertools import islice

import msgspec

from swapd.core import explain, fences, leases, registry, transfers, workspaces
from swapd.core.actions import Fence, Lost
from swapd.core.admission import Admission
from swapd.core.chunks import count
from swapd.core.events import (
    Dropped,
    Dropping,
    LetGo,
    ProcessExited,
    RulesChanged,
    SessionEnds,
    SessionGone,
    SessionOpened,
    Stopping,
    Tick,
    Unread,
)
from swapd.core.handlers import starting
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Move, Session
from swapd.core.states import State
from swapd.shared.protocol import Runs


def on_session_opened(ledger: Ledger, admission: Admission, event: SessionOpened) -> None:
    ledger.sessions[event.session] = Session(event.label)


def on_tick(ledger: Ledger, admission: Admission, event: Tick) -> None:
    fence_late(ledger)
    starting.refuse_late(ledger)
    for due in ledger.contents.expired(event.now):
        registry.order(ledger, due)
    ledger.replan = True


def on_stopping(ledger: Ledger, admission: Admission, event: Stopping) -> None:
    ledger.stopping = True
    ledger.prefetches.clear()
    starting.refuse_waiting(ledger)
    for w in list(admission.queue):
        admission.refuse(w.key, "stopping", explain.STOPPING)


def on_session_ends(ledger: Ledger, admission: Admission, event: SessionEnds) -> None:
    """End its waiters first, so that they are granted nothing; then its components and leases."""
    left = event.most
    session = ledger.sessions.get(event.session)
    if session is None:
        return
    for request in list(islice(session.waiters, left)):
        left -= 1
        if w := admission.queue.get((event.session, request)):
            admission.forget(w)
    for name in list(islice(session.owns, left)):
        if left > 0:
            left -= _end(ledger, admission, ledger.components[name], event, left)
    for request in list(islice(session.leases, max(left, 0))):
        leases.take_back(ledger, (event.session, request))
    ledger.replan = True


def _end(ledger: Ledger, admission: Admission, c: Component, event: SessionEnds, most: int) -> int:
    """End a component, or at most `most` waiters for it; return the number of steps."""
    c.ending = True
    waiters = len(c.waiting) + len(c.promised)
    why = explain.owner_gone(c, ledger.sessions[c.session].label)
    admission.turn_away(c, why, most)
    if waiters > most or not ledger.is_current(c):
        return most
    if c.unsaved:
        ledger.out.append(Lost(c.name, c.generation, explain.lost(c)))
    strand(ledger, c, alive=event.alive, ending=event.ending)
    return waiters + 1


def on_session_gone(ledger: Ledger, admission: Admission, event: SessionGone) -> None:
    session = ledger.sessions.pop(event.session, None)
    if session is None:
        return
    for name in session.told:
        ledger.wanted[name].discard(event.session)
    ledger.hurried.discard(event.session)
    ledger.debts.forget(event.session)
    starting.end_all(ledger, event.session)
    ledger.unhurried.pop(event.session, None)
    for c in session.makes_way.values():
        c.evicting_for = None
    owned = [ledger.components[name] for name in session.owns]
    for c in owned:
        if c.unsaved:
            ledger.out.append(Lost(c.name, c.generation, explain.lost(c)))
        strand(ledger, c, alive=event.alive, ending=event.ending)
    for request in list(session.waiters):
        if w := admission.queue.get((event.session, request)):
            admission.forget(w)
    for request in list(session.leases):
        leases.take_back(ledger, (event.session, request))
    for c in owned:
        admission.turn_away(c, explain.owner_gone(c, session.label))
    ledger.replan = True


def on_let_go(ledger: Ledger, admission: Admission, event: ProcessExited | LetGo) -> None:
    end_quarantine(ledger, event.session)
    ledger.replan = True


# --- debts --------------------------------------------------------------------------------


def on_dropping(ledger: Ledger, admission: Admission, event: Dropping) -> None:
    timeout_s = ledger.rules.ack_timeout_s
    for session in event.sessions:
        why = fences.kept_what_is_lent(timeout_s)
        _owe(ledger, session, event.generation, timeout_s, why)


def on_dropped(ledger: Ledger, admission: Admission, event: Dropped) -> None:
    ledger.debts.settle(event.session, event.generation)


def on_unread(ledger: Ledger, admission: Admission, event: Unread) -> None:
    """The session gets the whole time again after each message that it reads."""
    what = fences.LIFELINE if event.channel == "lifeline" else fences.REPLIES
    if not event.count:
        return ledger.debts.settle(event.session, what)
    timeout_s = ledger.rules.unread_timeout_s
    error = event.error
    why = fences.unsent(error, timeout_s) if error else fences.unread(what, timeout_s)
    _owe(ledger, event.session, what, timeout_s, why)


def _owe(ledger: Ledger, session: int, what: int, timeout_s: float, why: str) -> None:
    known = ledger.sessions.get(session)
    if known is not None and not known.fenced:
        ledger.debts.owe(session, what, ledger.now, timeout_s, why)


def fence_late(ledger: Ledger) -> None:
    """Fence sessions that are late with a debt."""
    while ledger.acks:
        since, c = next(iter(ledger.acks.values()))
        deadline = since + ledger.rules.ack_timeout_s
        if deadline > ledger.now:
            break
        del ledger.acks[c.generation]
        _fence(ledger, c.session, fences.unacknowledged(c, ledger.rules.ack_timeout_s))
    for session, why in ledger.debts.overdue(ledger.now):
        _fence(ledger, session, why)


def _fence(ledger: Ledger, number: int, why: str) -> None:
    session = ledger.sessions[number]
    if not session.fenced:
        session.fenced = True
        ledger.debts.forget(number)
        ledger.out.append(Fence(number, why))


# --- rules --------------------------------------------------------------------------------


def on_rules_changed(ledger: Ledger, admission: Admission, event: RulesChanged) -> None:
    """The next deadline may be past: that of requests or debts that are older than the new limits
    allow."""
    ledger.rules = msgspec.structs.replace(
        ledger.rules,
        ack_timeout_s=event.ack_timeout_s,
        residency_factor=event.residency_factor,
        residency_bound_s=event.residency_bound_s,
        patience_s=event.patience_s,
    )
    admission.queue.patience_s = event.patience_s
    timeout_s = event.ack_timeout_s
    ledger.debts.retime(timeout_s, fences.kept_what_is_lent(timeout_s))
    ledger.replan = True


# --- what is left behind --------------------------------------------------------------------


def strand(ledger: Ledger, c: Component, *, alive: bool, ending: bool) -> None:
    """The owner is gone: free now as much as possible, the rest when its copy ends."""
    leases.take_from_all(ledger, c)
    transfers.leave_room(ledger, c)
    if c.workspace:
        workspaces.close(ledger, c)
        if ledger.is_current(c):
            registry.remove(ledger, c)
        return
    ledger.acks.pop(c.generation, None)
    move = ledger.moves.get(c.generation)
    if c.evicting:
        ledger.leaving -= c.chunks
    # unsaved bytes are only on the device: the process may go on with them there
    unsaved = c.dirty and c.state is State.RESIDENT
    writer = c.session if alive and c.mutable and (c.mapped or unsaved) else None
    if writer is not None:
        ledger.quarantined.setdefault(writer, [])  # a copy in flight may add chunks when it ends
        if ending:
            ledger.dying.add(writer)
    if move:
        move.writer = writer
    elif c.on_device:
        _free(ledger, c.runs, writer)
    registry.remove(ledger, c)
    if not (move and move.uid == c.uid):
        registry.drop_master(ledger, c.uid)
    if c.renewal is not None:
        registry.drop_master(ledger, c.renewal.uid)
        c.renewal = None


def abandon(ledger: Ledger, move: Move) -> None:
    """A copy of a component that is gone has ended."""
    _free(ledger, move.runs, move.writer)
    registry.drop_master(ledger, move.uid)
    ledger.replan = True


def _free(ledger: Ledger, runs: Runs, writer: int | None) -> None:
    """Free these chunks; if `writer` may still write to them, only when its process ends."""
    if writer in ledger.quarantined:
        ledger.quarantined[writer].append(runs)
        if writer in ledger.dying:
            ledger.leaving += count(runs)
        else:
            ledger.fixed += count(runs)
            ledger.room_shrank = True
    else:
        ledger.pool.give(runs)


def end_quarantine(ledger: Ledger, session: int) -> None:
    """Its process has ended, or has unmapped them: free these chunks."""
    for runs in ledger.quarantined.pop(session, ()):
        if session in ledger.dying:
            ledger.leaving -= count(runs)
        else:
            ledger.fixed -= count(runs)
        ledger.pool.give(runs)
    ledger.dying.discard(session)
