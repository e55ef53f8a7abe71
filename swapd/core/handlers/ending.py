"""Sessions, time, and the end of both."""

from itertools import islice

from swapd.core import explain, gone, leases, registry
from swapd.core.actions import Lost
from swapd.core.admission import Admission
from swapd.core.events import (
    LetGo,
    ProcessExited,
    SessionEnds,
    SessionGone,
    SessionOpened,
    Stopping,
    Tick,
)
from swapd.core.handlers import owing, starting
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Session


def on_session_opened(ledger: Ledger, admission: Admission, event: SessionOpened) -> None:
    ledger.sessions[event.session] = Session(event.label)


def on_tick(ledger: Ledger, admission: Admission, event: Tick) -> None:
    owing.fence_late(ledger)
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
    gone.strand(ledger, c, alive=event.alive, ending=event.ending)
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
        gone.strand(ledger, c, alive=event.alive, ending=event.ending)
    for request in list(session.waiters):
        if w := admission.queue.get((event.session, request)):
            admission.forget(w)
    for request in list(session.leases):
        leases.take_back(ledger, (event.session, request))
    for c in owned:
        admission.turn_away(c, explain.owner_gone(c, session.label))
    ledger.replan = True


def on_let_go(ledger: Ledger, admission: Admission, event: ProcessExited | LetGo) -> None:
    gone.end_quarantine(ledger, event.session)
    ledger.replan = True
