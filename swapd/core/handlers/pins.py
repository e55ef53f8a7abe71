"""Requests of onlookers: that a component stays (a pin), or leaves at once."""

from collections.abc import Iterable

from swapd.core import explain, transfers
from swapd.core.admission import Admission
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Key, Waiter
from swapd.core.states import State
from swapd.shared.protocol import Code, EvictNow, Pin
from swapd.shared.units import size


def on_pin(ledger: Ledger, admission: Admission, session: int, asked: Pin) -> None:
    key = (session, asked.id)
    members = _members(ledger, key, asked.name)
    if members is None:
        return
    if not asked.unpin:
        problem = why_no_pin(ledger, members, admission.queue)
    else:
        problem = why_no_unpin(ledger, members)
    if problem:
        return ledger.refuse(key, *problem)
    for c in members:
        transfers.set_pinned(ledger, c, not asked.unpin)
    ledger.accept(key)


def on_evict_now(ledger: Ledger, admission: Admission, session: int, asked: EvictNow) -> None:
    key = (session, asked.id)
    members = _members(ledger, key, asked.name)
    if members is None:
        return
    if problem := why_no_eviction(ledger, members):
        return ledger.refuse(key, *problem)
    for c in members:
        if c.name in ledger.idle:
            transfers.evict(ledger, c, "asked", None)
    ledger.accept(key)


def _members(ledger: Ledger, key: Key, name: str) -> list[Component] | None:
    """The components of this name; None if the request was refused."""
    if ledger.stopping:
        ledger.refuse(key, "stopping", explain.STOPPING)
        return None
    if (family := ledger.families.get(name)) is not None:
        return list(family.values())
    if ledger.may_be_acquired(name):
        return [ledger.components[name]]
    ledger.refuse(key, "unknown_component", explain.unknown(ledger, name))
    return None


Refusal = tuple[Code, str]


def why_no_pin(ledger: Ledger, asked: list[Component], waiters: Iterable[Waiter]) -> Refusal | None:
    """A pinned component takes its room from all others: each of these, and each waiter, must still
    fit."""
    for c in asked:
        if c.group is not None:
            return "conflict", (
                f"{c.name!r} takes turns with the other members of group {c.group}: if it stayed, "
                "none of them could come in. Register it in no group to pin it"
            )
        if c.evicting:
            return "in_use", f"{c.name!r} is leaving the device; pin it when it has left"
    stays = {c.name for c in asked if c.policy == c.own_policy}
    fixed = ledger.staying + sum(
        c.chunks for c in asked if c.name in stays and c.policy != "permanent"
    )

    def beside(others: Iterable[Component]) -> int:
        return sum(c.chunks for c in others if c.policy != "permanent" and c.name not in stays)

    known = ledger.components
    if fixed > ledger.pool.total:
        return "too_large", _no_room(ledger, asked, fixed, "")
    for c in known.values():
        if fixed + beside([c]) > ledger.pool.total:
            return "too_large", _no_room(ledger, asked, fixed, explain.called(c))
    for w in waiters:
        if fixed + beside(known[n] for n in w.names if n in known) > ledger.pool.total:
            what = f"{explain.asked_for(ledger, w)}, which {explain.who(ledger, w.session)}"
            return "too_large", _no_room(ledger, asked, fixed, f"{what} waits for,")
    return None


def _no_room(ledger: Ledger, asked: list[Component], fixed: int, other: str) -> str:
    beside = f"{other} would not fit any more" if other else "they would not fit together"
    return (
        f"{explain.together(ledger, asked)} cannot stay: beside "
        f"{size(fixed * ledger.chunk_bytes)} that never leave {beside}; the budget is "
        f"{size(ledger.pool.total * ledger.chunk_bytes)}. Unpin another one, or raise the daemon's "
        "--budget"
    )


def why_no_unpin(ledger: Ledger, asked: list[Component]) -> Refusal | None:
    """Components registered as "permanent" are not pinned."""
    if any(c.pinned or c.own_policy != "permanent" for c in asked):
        return None
    return "conflict", _as_registered(ledger, asked)


def why_no_eviction(ledger: Ledger, asked: list[Component]) -> Refusal | None:
    """A component that is leased, promised or loading stays; with the device down, all stay."""
    if ledger.down:
        return "device_failed", explain.device_down(ledger.down)
    there = [c for c in asked if c.on_device and not c.evicting]
    for c in there:
        if c.policy != "permanent" and c.name not in ledger.idle:
            return "in_use", _used(ledger, c)
    may_go = [c for c in there if c.name in ledger.idle]
    for c in may_go:
        if c.waiting:
            first = next(iter(c.waiting))
            whose = explain.who(ledger, first[0])
            return "in_use", f"{c.name!r} is needed by {whose}, which waits; try again later"
    if not there or may_go:
        return None
    if any(c.pinned for c in there):
        return "conflict", f"{explain.together(ledger, asked)} is pinned; unpin it first"
    return "conflict", _as_registered(ledger, asked)


def _used(ledger: Ledger, c: Component) -> str:
    if c.leases:
        names = ", ".join(explain.holders(ledger, c, explain.NAMED_MAX))
        written = ", and being written to" if c.mutable else ""
        return f"{c.name!r} is leased by {names}{written}; it can go once it is released"
    if c.state is State.LOADING:
        return f"{c.name!r} is coming in; try again when it is loaded"
    return f"{c.name!r} is kept for a waiter; try again after its use"


def _as_registered(ledger: Ledger, asked: list[Component]) -> str:
    return (
        f'{explain.together(ledger, asked)} was registered as "permanent": it never leaves until '
        "it is unregistered"
    )
