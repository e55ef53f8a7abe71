"""Handles the turn to start: one process at a time."""

from swapd.core import explain
from swapd.core.actions import Grant, Waiting
from swapd.core.admission import Admission
from swapd.core.ledger import Ledger
from swapd.core.records import Key
from swapd.core.requests import deadline
from swapd.shared.protocol import THE_START, AcquireStart


def on_acquire_start(
    ledger: Ledger, admission: Admission, session: int, asked: AcquireStart
) -> None:
    """Refuse a session with leases: other sessions would wait for the turn and for its leases."""
    key, starts = (session, asked.id), ledger.starts
    known = ledger.sessions.get(session)
    if known is None or key in starts or {asked.id} & (known.waiters | known.leases):
        return ledger.refuse(key, "bad_request", explain.REPLAYED)
    if ledger.stopping:
        return ledger.refuse(key, "stopping", explain.STOPPING)
    if known.leases or starts.of(session):
        return ledger.refuse(key, "conflict", explain.STARTS_WITH_NOTHING)
    starts.come(key, ledger.now, deadline(asked.timeout_s, ledger.now))
    if starts.turn == key:
        ledger.out.append(Grant(*key, (), 0.0, False))
    elif asked.timeout_s == 0.0:
        _refuse_late(ledger, key, tried=True)
    else:
        why = explain.starting(ledger)
        ledger.out.append(Waiting(*key, (THE_START,), why))


def end(ledger: Ledger, key: Key) -> bool:
    """The session has started, or gives up; return whether it was here. The next one gets the
    turn."""
    starts = ledger.starts
    if key not in starts:
        return False
    had_turn = starts.turn == key
    starts.go(key)
    if had_turn and (following := starts.turn) is not None:
        waited = ledger.now - starts.has_turn(following)
        ledger.out.append(Grant(*following, (), waited, False))
    return True


def end_all(ledger: Ledger, session: int) -> None:
    """End all starts of a session."""
    for key in reversed(ledger.starts.of(session)):  # its turn last: it must not get it again
        end(ledger, key)


def refuse_late(ledger: Ledger) -> None:
    """Refuse sessions whose deadline has passed."""
    for key in ledger.starts.late(ledger.now):
        _refuse_late(ledger, key)


def refuse_waiting(ledger: Ledger) -> None:
    """swapd stops: refuse all but the session with the turn, which keeps it until it has
    started."""
    for key in list(ledger.starts)[1:]:
        end(ledger, key)
        ledger.refuse(key, "stopping", explain.STOPPING, names=())


def _refuse_late(ledger: Ledger, key: Key, *, tried: bool = False) -> None:
    why = f"the turn to start was not granted in time: {explain.starting(ledger)}"
    end(ledger, key)
    ledger.refuse(key, "timeout", why, tried=tried, names=())
