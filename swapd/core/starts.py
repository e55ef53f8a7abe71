"""The turn to start: one process at a time measures the free memory of the device.

An engine sizes its caches by the memory that is free before it loads and after its first pass.
While another one loads, or borrows memory to load in, that measurement means nothing. The first of
`Ledger.starts` has the turn.
"""

from swapd.core import explain
from swapd.core.actions import Grant, Waiting
from swapd.core.ledger import Ledger
from swapd.core.records import Key
from swapd.core.requests import deadline
from swapd.shared.protocol import THE_START, AcquireStart


def on_acquire_start(ledger: Ledger, session: int, asked: AcquireStart) -> None:
    """Refuse a session with leases: other sessions would wait for the turn and for its leases."""
    key, starts = (session, asked.id), ledger.starts
    if problem := explain.unheard(ledger, key):
        return ledger.refuse(key, *problem)
    if ledger.sessions[session].leases or any(other == session for other, _ in starts):
        return ledger.refuse(key, "conflict", explain.STARTS_WITH_NOTHING)
    starts[key] = ledger.now
    if len(starts) == 1:
        ledger.out.append(Grant(*key, (), 0.0, False))
    elif asked.timeout_s == 0.0:
        _refuse_late(ledger, key, tried=True)
    else:
        until = deadline(asked.timeout_s, ledger.now)
        if until is not None:
            ledger.start_deadlines.set(key, until)
        ledger.out.append(Waiting(*key, (THE_START,), explain.starting(ledger)))


def end(ledger: Ledger, key: Key) -> bool:
    """The session has started, or gives up; return whether it was here. The next one gets the
    turn."""
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


def end_all(ledger: Ledger, session: int) -> None:
    own = [key for key in ledger.starts if key[0] == session]
    for key in reversed(own):  # its turn last: it must not get it again
        end(ledger, key)


def refuse_late(ledger: Ledger) -> None:
    for key in ledger.start_deadlines.over(ledger.now):
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
