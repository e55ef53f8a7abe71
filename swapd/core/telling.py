"""What holders are told of those who wait: that a component is wanted, that there is a hurry.

Once each, and again when it is over.
"""

from swapd.core.actions import Hurry, Want
from swapd.core.ledger import Ledger


def want(ledger: Ledger, name: str) -> None:
    """Somebody waits for `name`: tell the holders that were not told."""
    told = ledger.wanted.setdefault(name, set())
    ledger.joined.pop(name, None)
    for session in sorted(ledger.components[name].holders.keys() - told):
        ledger.out.append(Want(session, name, True))
        ledger.sessions[session].told.add(name)
        told.add(session)


def unwant(ledger: Ledger, name: str) -> None:
    """Nobody waits for `name` any more: tell the holders that were told."""
    ledger.joined.pop(name, None)
    for session in sorted(ledger.wanted.pop(name, ())):
        ledger.out.append(Want(session, name, False))
        ledger.sessions[session].told.discard(name)


def hurry(ledger: Ledger) -> None:
    """Somebody waits for what may be held: tell all that hold something, once."""
    for number in ledger.unhurried:
        ledger.hurried.add(number)
        ledger.out.append(Hurry(number, True))
    ledger.unhurried.clear()


def take_time(ledger: Ledger) -> None:
    """Nobody waits for that any more: tell those that were told."""
    for number in sorted(ledger.hurried):
        ledger.out.append(Hurry(number, False))
        if ledger.sessions[number].leases:
            ledger.unhurried[number] = None
    ledger.hurried.clear()
