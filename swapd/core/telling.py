"""Messages to holders about waiters: that a component is wanted, and that there is a hurry.

Each holder hears it once, and again when it is over.
"""

from swapd.core.actions import Hurry, Want
from swapd.core.ledger import Ledger


def want(ledger: Ledger, name: str) -> None:
    """An acquire waits for `name`: tell the holders that were not told."""
    told = ledger.wanted.setdefault(name, set())
    ledger.joined.pop(name, None)
    for session in sorted(ledger.components[name].holders.keys() - told):
        ledger.out.append(Want(session, name, True))
        ledger.sessions[session].told.add(name)
        told.add(session)


def unwant(ledger: Ledger, name: str) -> None:
    """No acquire waits for `name` any more: tell the holders that were told."""
    ledger.joined.pop(name, None)
    for session in sorted(ledger.wanted.pop(name, ())):
        ledger.out.append(Want(session, name, False))
        ledger.sessions[session].told.discard(name)


def hurry(ledger: Ledger) -> None:
    """An acquire waits for leases to end: tell all sessions with leases, once."""
    for number in ledger.unhurried:
        ledger.hurried.add(number)
        ledger.out.append(Hurry(number, True))
    ledger.unhurried.clear()


def take_time(ledger: Ledger) -> None:
    """No acquire waits for leases any more: tell the sessions that were told."""
    for number in sorted(ledger.hurried):
        ledger.out.append(Hurry(number, False))
        if ledger.sessions[number].leases:
            ledger.unhurried[number] = None
    ledger.hurried.clear()
