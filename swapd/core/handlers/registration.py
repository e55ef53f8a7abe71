"""What registrations, updates and the masters that are made for them mean."""

from swapd.core import explain, leaving, registry, updates
from swapd.core.admission import Admission
from swapd.core.events import (
    Commit,
    GiveUp,
    MasterFailed,
    MasterMade,
    MasterSealed,
    Register,
    Unregister,
    Update,
)
from swapd.core.ledger import Ledger
from swapd.core.records import WORKSPACE, Component, State
from swapd.shared.protocol import Code


def on_register(ledger: Ledger, admission: Admission, event: Register) -> None:
    chunks = ledger.chunks_for(event.nbytes)
    if problem := _unregisterable(ledger, event, chunks):
        ledger.refuse((event.session, event.request), *problem)
    else:
        registry.register(ledger, event, chunks)


def _unregisterable(ledger: Ledger, event: Register, chunks: int) -> tuple[Code, str] | None:
    """Why a component may not be registered, or None if it may."""
    if event.session not in ledger.sessions:
        return "bad_request", explain.REPLAYED
    if event.nbytes < 0:
        return "bad_request", explain.SIZE
    if event.name.startswith(WORKSPACE):
        return "bad_request", explain.RESERVED
    if ledger.stopping:
        return "stopping", explain.STOPPING
    if problem := _misnamed(ledger, event):
        return problem
    if (event.policy == "alternating") != (event.group is not None):
        return "bad_request", explain.GROUP
    fixed = ledger.never_leaving() if event.policy == "resident" else 0
    if chunks + fixed > ledger.pool.total:
        return "too_large", explain.too_large(ledger, event.name, chunks, fixed)
    return None


def _misnamed(ledger: Ledger, event: Register) -> tuple[Code, str] | None:
    """A name is one component's, or one family's, which belongs to one session."""
    if other := ledger.components.get(event.name):
        return "duplicate_name", explain.duplicate(ledger, other)
    if parts := ledger.families.get(event.name):
        return "duplicate_name", explain.is_family(ledger, event.name, parts.values())
    if not event.part_of:
        return None
    if event.part_of.startswith(WORKSPACE):
        return "bad_request", explain.RESERVED
    if event.part_of == event.name:
        return "bad_request", explain.part_of_itself(event.name)
    if other := ledger.components.get(event.part_of):
        return "duplicate_name", explain.duplicate(ledger, other)
    parts = ledger.families.get(event.part_of, {})
    if any(c.session != event.session for c in parts.values()):
        return "duplicate_name", explain.is_family(ledger, event.part_of, parts.values())
    return None


def on_master_made(ledger: Ledger, admission: Admission, event: MasterMade) -> None:
    c = _made_or_sealed(ledger, event.uid)
    if c is None:
        return
    if c.renewal is not None:
        updates.answer(ledger, c, c.renewal)
    else:
        registry.answer(ledger, c)


def on_commit(ledger: Ledger, admission: Admission, event: Commit) -> None:
    key = (event.session, event.request)
    parts = []
    for name in dict.fromkeys((event.name, *event.also)):
        c = ledger.components.get(name)
        if c is None or c.workspace or c.session != event.session:
            return ledger.refuse(key, "unknown_component", explain.unknown(ledger, name))
        parts.append(c)
    if all(c.renewal is not None and c.renewal.request is None for c in parts):
        return updates.seal_together(ledger, tuple(parts), event.request)
    c = parts[0]
    if len(parts) > 1 or c.state is not State.FILLING or c.answer is not None:
        return ledger.refuse(key, "bad_request", explain.committed([c.name for c in parts]))
    c.answer = event.request
    registry.seal(ledger, c, c.uid)


def on_master_sealed(ledger: Ledger, admission: Admission, event: MasterSealed) -> None:
    for turn in ledger.contents.sealed(event.uid):
        registry.order(ledger, turn)
    c = _made_or_sealed(ledger, event.uid)
    if c is None:
        return
    if c.renewal is not None:
        updates.sealed(ledger, c, c.renewal)
    else:
        registry.commit(ledger, c)
        admission.unpark(c)


def on_master_failed(ledger: Ledger, admission: Admission, event: MasterFailed) -> None:
    """A component whose first master fails is gone; an update that fails changes nothing."""
    c = _made_or_sealed(ledger, event.uid)
    if c is None:
        return
    if c.renewal is not None:
        assert c.renewal.request is not None
        ledger.refuse((c.session, c.renewal.request), event.code, event.why)
        return updates.give_up(ledger, c, c.renewal)
    assert c.answer is not None
    ledger.refuse((c.session, c.answer), event.code, event.why)
    registry.remove(ledger, c)
    registry.drop_master(ledger, c.uid)


def _made_or_sealed(ledger: Ledger, uid: int) -> Component | None:
    """A master was made or sealed, or failed; None if nobody wants it any more."""
    c = ledger.masters[uid]
    ledger.making.discard(uid)
    wanted = c.renewal.uid if c.renewal is not None else c.uid
    if ledger.is_current(c) and uid == wanted:
        return c
    registry.drop_master(ledger, uid)
    return None


def on_update(ledger: Ledger, admission: Admission, event: Update) -> None:
    key = (event.session, event.request)
    c = ledger.components.get(event.name)
    if c is None or not ledger.may_be_acquired(event.name):
        return ledger.refuse(key, "unknown_component", explain.unknown(ledger, event.name))
    if c.session != event.session:
        return ledger.refuse(key, "not_owner", explain.not_owner(ledger, c, "update"))
    if c.mutable:
        return ledger.refuse(key, "bad_request", explain.written_under_a_lease(c))
    if ledger.stopping:
        return ledger.refuse(key, "stopping", explain.STOPPING)
    if c.renewal is not None:
        return ledger.refuse(key, "in_use", explain.being_updated(c))
    updates.begin(ledger, c, event.request)


def on_give_up(ledger: Ledger, admission: Admission, event: GiveUp) -> None:
    key = (event.session, event.request)
    c = ledger.components.get(event.name)
    if c is not None and c.session == event.session and c.updated_by == event.update:
        return ledger.refuse(key, "bad_request", explain.took_place(c))
    renewal = c.renewal if c is not None and c.session == event.session else None
    if c is not None and renewal is not None and renewal.begun_by == event.update:
        if renewal.request is not None:
            asked = (c.session, renewal.request)
            ledger.refuse(asked, "bad_request", explain.given_up(c))
        updates.give_up(ledger, c, renewal)
    ledger.accept(key)


def on_unregister(ledger: Ledger, admission: Admission, event: Unregister) -> None:
    key = (event.session, event.request)
    c = ledger.components.get(event.name)
    if c is None or c.workspace:
        return ledger.refuse(key, "unknown_component", explain.unknown(ledger, event.name))
    if c.session != event.session:
        return ledger.refuse(key, "not_owner", explain.not_owner(ledger, c, "unregister"))
    if c.leases or c.answer is not None or c.renewal is not None:
        return ledger.refuse(key, "in_use", explain.in_use(ledger, c))
    if c.damaged and c.dirty:  # its worker can put it together, and nobody else
        return ledger.refuse(key, "device_failed", explain.damaged(c))
    c.answer = event.request
    registry.set_unregistering(ledger, c, True)
    admission.turn_away(c, explain.unregistered(c))
    if not ledger.is_current(c):
        return  # the last promise on it fell, and with it the component
    if c.state is State.RESIDENT:
        leaving.go(ledger, c)
    elif c.state in (State.ABSENT, State.FILLING):
        registry.finish_unregister(ledger, c)
