"""Handles registrations, updates, and the host copies made for them."""

from swapd.core import explain, registry, transfers, updates
from swapd.core.admission import Admission
from swapd.core.events import HostCopiesPinned, HostCopyFailed, HostCopyMade, HostCopySealed
from swapd.core.ledger import Ledger
from swapd.core.records import Component
from swapd.core.states import State
from swapd.shared.protocol import Code, Commit, GiveUp, Register, Unregister, Update


def on_register(ledger: Ledger, admission: Admission, session: int, asked: Register) -> None:
    chunks = ledger.chunks_for(asked.nbytes)
    if problem := _unregisterable(ledger, session, asked, chunks):
        ledger.refuse((session, asked.id), *problem)
    else:
        registry.register(ledger, session, asked, chunks)


def _unregisterable(
    ledger: Ledger, session: int, asked: Register, chunks: int
) -> tuple[Code, str] | None:
    """Why a component may not be registered, or None if it may."""
    if session not in ledger.sessions:
        return "bad_request", explain.REPLAYED
    if ledger.stopping:
        return "stopping", explain.STOPPING
    if problem := _misnamed(ledger, session, asked):
        return problem
    fixed = ledger.never_leaving(pins=False) if asked.policy == "permanent" else 0
    if chunks + fixed > ledger.pool.total:
        instead = explain.LESS_SCRATCH if asked.scratch else explain.SMALLER
        return "too_large", explain.too_large(ledger, asked.name, chunks, fixed, instead)
    return None


def _misnamed(ledger: Ledger, session: int, asked: Register) -> tuple[Code, str] | None:
    """A name belongs to one component or one family, and a family to one session."""
    if other := ledger.components.get(asked.name):
        return "duplicate_name", explain.duplicate(ledger, other)
    if parts := ledger.families.get(asked.name):
        return "duplicate_name", explain.is_family(ledger, asked.name, parts.values())
    if not asked.part_of:
        return None
    if other := ledger.components.get(asked.part_of):
        return "duplicate_name", explain.duplicate(ledger, other)
    parts = ledger.families.get(asked.part_of, {})
    if any(c.session != session for c in parts.values()):
        return "duplicate_name", explain.is_family(ledger, asked.part_of, parts.values())
    return None


def on_host_copy_made(ledger: Ledger, admission: Admission, event: HostCopyMade) -> None:
    c = _made_or_sealed(ledger, event.uid)
    if c is None:
        return
    if c.renewal is not None:
        updates.answer(ledger, c, c.renewal)
    else:
        registry.answer(ledger, c)


def on_commit(ledger: Ledger, admission: Admission, session: int, asked: Commit) -> None:
    key = (session, asked.id)
    parts = []
    for name in dict.fromkeys((asked.name, *asked.also)):
        c = ledger.components.get(name)
        if c is None or c.workspace or c.session != session:
            return ledger.refuse(key, "unknown_component", explain.unknown(ledger, name))
        parts.append(c)
    if all(c.renewal is not None and c.renewal.request is None for c in parts):
        return updates.seal_together(ledger, tuple(parts), asked.id)
    c = parts[0]
    if len(parts) > 1 or c.state is not State.FILLING or c.answer is not None:
        return ledger.refuse(key, "bad_request", explain.committed([c.name for c in parts]))
    c.answer = asked.id
    registry.seal(ledger, c, c.uid)


def on_host_copy_sealed(ledger: Ledger, admission: Admission, event: HostCopySealed) -> None:
    for due in ledger.contents.sealed(event.uid):
        registry.order(ledger, due)
    c = _made_or_sealed(ledger, event.uid)
    if c is None:
        return
    if c.renewal is not None:
        updates.sealed(ledger, c, c.renewal)
    else:
        registry.commit(ledger, c)
        admission.unpark(c)


def on_host_copies_pinned(ledger: Ledger, admission: Admission, event: HostCopiesPinned) -> None:
    """For the record: copies of pinned host copies are faster, and nothing else differs."""


def on_host_copy_failed(ledger: Ledger, admission: Admission, event: HostCopyFailed) -> None:
    """A component whose first host copy fails is gone; an update that fails changes nothing."""
    c = _made_or_sealed(ledger, event.uid)
    if c is None:
        return
    no_memory = event.code == "host_memory"
    why = explain.no_host_copy(ledger, c, event.why) if no_memory else event.why
    if c.renewal is not None:
        assert c.renewal.request is not None
        ledger.refuse((c.session, c.renewal.request), event.code, why, names=(c.name,))
        return updates.give_up(ledger, c, c.renewal)
    assert c.answer is not None
    ledger.refuse((c.session, c.answer), event.code, why, names=(c.name,))
    registry.remove(ledger, c)
    registry.drop_master(ledger, c.uid)


def _made_or_sealed(ledger: Ledger, uid: int) -> Component | None:
    """The owner of a host copy that was made or sealed, or failed; None if it is no longer
    needed."""
    c = ledger.masters[uid]
    ledger.making.discard(uid)
    wanted = c.renewal.uid if c.renewal is not None else c.uid
    if ledger.is_current(c) and uid == wanted:
        return c
    registry.drop_master(ledger, uid)
    return None


def on_update(ledger: Ledger, admission: Admission, session: int, asked: Update) -> None:
    key = (session, asked.id)
    c = ledger.components.get(asked.name)
    if c is None or not ledger.may_be_acquired(asked.name):
        return ledger.refuse(key, "unknown_component", explain.unknown(ledger, asked.name))
    if c.session != session:
        return ledger.refuse(key, "not_owner", explain.not_owner(ledger, c, "update"))
    if c.mutable:
        return ledger.refuse(key, "bad_request", explain.written_under_a_lease(c))
    if ledger.stopping:
        return ledger.refuse(key, "stopping", explain.STOPPING)
    if c.renewal is not None:
        return ledger.refuse(key, "in_use", explain.being_updated(ledger, c))
    updates.begin(ledger, c, asked.id)


def on_give_up(ledger: Ledger, admission: Admission, session: int, asked: GiveUp) -> None:
    key = (session, asked.id)
    c = ledger.components.get(asked.name)
    if c is not None and c.session == session and c.updated_by == asked.update:
        return ledger.refuse(key, "bad_request", explain.took_place(c))
    renewal = c.renewal if c is not None and c.session == session else None
    if c is not None and renewal is not None and renewal.begun_by == asked.update:
        if renewal.request is not None:
            waiting = (c.session, renewal.request)
            ledger.refuse(waiting, "bad_request", explain.given_up(c))
        updates.give_up(ledger, c, renewal)
    ledger.accept(key)


def on_unregister(ledger: Ledger, admission: Admission, session: int, asked: Unregister) -> None:
    key = (session, asked.id)
    c = ledger.components.get(asked.name)
    if c is None or c.workspace:
        return ledger.refuse(key, "unknown_component", explain.unknown(ledger, asked.name))
    if c.session != session:
        return ledger.refuse(key, "not_owner", explain.not_owner(ledger, c, "unregister"))
    if c.leases or c.answer is not None or c.renewal is not None:
        return ledger.refuse(key, "in_use", explain.in_use(ledger, c))
    c.answer = asked.id
    registry.set_unregistering(ledger, c, True)
    admission.turn_away(c, explain.unregistered(ledger, c))
    if not ledger.is_current(c):
        return  # that ended its last promise, and with it the component
    if c.state is State.RESIDENT:
        transfers.go(ledger, c)
    elif c.state in (State.ABSENT, State.FILLING):
        registry.finish_unregister(ledger, c)
