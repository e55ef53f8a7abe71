"""The debts of sessions, and the end of sessions that are late with them."""

from swapd.core import fences
from swapd.core.actions import Fence
from swapd.core.admission import Admission
from swapd.core.events import Dropped, Dropping, Unread
from swapd.core.ledger import Ledger


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
