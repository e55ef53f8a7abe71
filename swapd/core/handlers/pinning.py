"""Requests of onlookers: that a component stays, or leaves at once."""

from swapd.core import explain, leaving, pins
from swapd.core.admission import Admission
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Key
from swapd.shared.protocol import EvictNow, Pin


def on_pin(ledger: Ledger, admission: Admission, session: int, asked: Pin) -> None:
    key = (session, asked.id)
    members = _members(ledger, key, asked.name)
    if members is None:
        return
    if not asked.unpin:
        problem = pins.why_no_pin(ledger, members, admission.queue)
    else:
        problem = pins.why_no_unpin(ledger, members)
    if problem:
        return ledger.refuse(key, *problem)
    for c in members:
        leaving.set_pinned(ledger, c, not asked.unpin)
    ledger.accept(key)


def on_evict_now(ledger: Ledger, admission: Admission, session: int, asked: EvictNow) -> None:
    key = (session, asked.id)
    members = _members(ledger, key, asked.name)
    if members is None:
        return
    if problem := pins.why_no_eviction(ledger, members):
        return ledger.refuse(key, *problem)
    for c in members:
        if c.name in ledger.idle:
            leaving.evict(ledger, c, "asked", None)
    ledger.accept(key)


def _members(ledger: Ledger, key: Key, name: str) -> list[Component] | None:
    """The components of this name; None if the request was refused."""
    if ledger.stopping:
        ledger.refuse(key, "stopping", explain.STOPPING)
        return None
    members = pins.members(ledger, name)
    if members is None:
        ledger.refuse(key, "unknown_component", explain.unknown(ledger, name))
    return members
