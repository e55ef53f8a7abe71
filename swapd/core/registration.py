"""Handles registrations, updates, and the events of host copies."""

from swapd.core import admission, explain, registry, requests, transfers
from swapd.core.actions import MakeHostCopy, SealHostCopy
from swapd.core.contents import DueHostCopy
from swapd.core.events import HostCopyFailed, HostCopyFound, HostCopyMade, HostCopySealed
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Key, Renewal, is_workspace
from swapd.core.states import State
from swapd.shared.protocol import Code, Commit, Forget, GiveUp, Register, Unregister, Update


def on_register(ledger: Ledger, key: Key, asked: Register) -> None:
    chunks = ledger.chunks_for(asked.nbytes)
    if problem := _unregisterable(ledger, key[0], asked, chunks):
        ledger.refuse(key, *problem)
    else:
        registry.register(ledger, key[0], asked, chunks)


def _unregisterable(
    ledger: Ledger, session: int, asked: Register, chunks: int
) -> tuple[Code, str] | None:
    if session not in ledger.sessions:
        return "bad_request", explain.REPLAYED
    if problem := _misnamed(ledger, session, asked):
        return problem
    fixed = ledger.never_leaving() if asked.policy == "permanent" else 0
    if chunks + fixed > ledger.pool.total:
        instead = explain.LESS_SCRATCH if asked.scratch else explain.SMALLER
        return "too_large", explain.too_large(ledger, asked.name, chunks, fixed, instead)
    return None


def _misnamed(ledger: Ledger, session: int, asked: Register) -> tuple[Code, str] | None:
    """A name belongs to one component or family, and a family to one session."""
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


def on_host_copy_made(ledger: Ledger, event: HostCopyMade) -> None:
    if (c := _made_or_sealed(ledger, event.uid)) is not None:
        registry.answer(ledger, c)


def on_commit(ledger: Ledger, key: Key, asked: Commit) -> None:
    names = dict.fromkeys((asked.name, *asked.also))
    session = ledger.sessions.get(key[0])
    owns = session.owns if session is not None else {}
    for name in names:
        if name not in owns or is_workspace(name):
            return ledger.refuse(key, "unknown_component", explain.unknown(ledger, name))
    parts = ledger.named(names)
    renewals = _being_filled(parts)
    if len(renewals) == len(parts):
        return _seal_together(ledger, renewals, asked.id)
    c = parts[0]
    if len(parts) > 1 or c.state is not State.FILLING or c.answer is not None:
        return ledger.refuse(key, "bad_request", explain.committed([c.name for c in parts]))
    c.answer = asked.id
    registry.order_now(ledger, SealHostCopy(c.uid, c.name))


def _being_filled(parts: list[Component]) -> tuple[Renewal, ...]:
    return tuple(c.renewal for c in parts if c.renewal is not None and c.answer is None)


def on_host_copy_sealed(ledger: Ledger, event: HostCopySealed) -> None:
    for due in ledger.host.contents.sealed(event.uid):
        registry.order(ledger, due)
    registry.forget_doubles(ledger)
    c = _made_or_sealed(ledger, event.uid)
    if c is None:
        return
    if c.renewal is not None:
        _sealed(ledger, c.renewal)
    else:
        registry.answer(ledger, c)
        c.enter(State.ABSENT)
        admission.unpark(ledger, c)


def on_host_copy_found(ledger: Ledger, event: HostCopyFound) -> None:
    """Seal it; as no component needs it, it is then kept. Others with its content wait until
    then."""
    uid, nbytes, chunks = event.uid, event.nbytes, ledger.chunks_for(event.nbytes)
    c = Component(uid, event.name, 0, nbytes, chunks, "lru", None, mutable=False)
    c.part_of, c.content, c.layout = event.part_of, event.content, event.layout
    ledger.host.owners[uid] = c
    key = requests.content(event), nbytes
    due = ledger.host.contents.ask(uid, 0, key, ledger.now, certain=True)
    assert due == DueHostCopy(uid), "found twice, or too late"
    registry.order_now(ledger, SealHostCopy(uid, c.name))


def on_host_copy_failed(ledger: Ledger, event: HostCopyFailed) -> None:
    """Remove the component, or give up its update. If memory is short, drop kept host copies and
    retry."""
    order, host = ledger.host.making[event.uid], ledger.host
    c = _made_or_sealed(ledger, event.uid)
    if c is None:
        return
    if event.short and host.kept and isinstance(order, MakeHostCopy):
        oldest = host.owners[next(iter(host.kept))].nbytes
        registry.forget_all_but(ledger, max(host.kept_bytes - max(c.nbytes, oldest), 0))
        return registry.order_now(ledger, order)
    no_memory = event.code == "host_memory"
    why = explain.no_host_copy(ledger, c, event.why) if no_memory else event.why
    assert c.answer is not None
    ledger.refuse((c.session, c.answer), event.code, why, names=(c.name,))
    if c.renewal is not None:
        return _give_up(ledger, c.renewal)
    registry.remove(ledger, c)
    registry.let_go_of_host_copy(ledger, c.uid)


def _made_or_sealed(ledger: Ledger, uid: int) -> Component | None:
    """None: the host copy is no longer needed, and was let go."""
    c = ledger.host.owners[uid]
    ledger.host.making.pop(uid, None)
    wanted = c.renewal.uid if c.renewal is not None else c.uid
    if ledger.is_current(c) and uid == wanted:
        return c
    registry.let_go_of_host_copy(ledger, uid)
    return None


def on_update(ledger: Ledger, key: Key, asked: Update) -> None:
    c = ledger.components.get(asked.name)
    if c is None or not ledger.may_be_acquired(asked.name):
        return ledger.refuse(key, "unknown_component", explain.unknown(ledger, asked.name))
    if c.session != key[0]:
        return ledger.refuse(key, "not_owner", explain.not_owner(ledger, c, "update"))
    if c.mutable:
        return ledger.refuse(key, "bad_request", explain.written_under_a_lease(c))
    if c.renewal is not None:
        return ledger.refuse(key, "in_use", explain.being_updated(ledger, c))
    # the first host copy and the bytes on the device stay
    c.renewal, c.answer = Renewal(c, ledger.next_uid(), asked.id), asked.id
    registry.make_host_copy(ledger, c, c.renewal.uid, asked.id)


def on_give_up(ledger: Ledger, key: Key, asked: GiveUp) -> None:
    c = ledger.components.get(asked.name)
    if c is None or c.session != key[0]:
        return ledger.accept(key)
    if c.updated_by == asked.update:
        why = f"the update of {c.name!r} has taken place already; it cannot be given up"
        return ledger.refuse(key, "bad_request", why)
    if c.renewal is not None and c.renewal.begun_by == asked.update:
        if c.answer is not None:
            why = f"the update of {c.name!r} was given up by the session that began it"
            ledger.refuse((c.session, c.answer), "bad_request", why)
        _give_up(ledger, c.renewal)
    ledger.accept(key)


def on_unregister(ledger: Ledger, key: Key, asked: Unregister) -> None:
    c = ledger.components.get(asked.name)
    if c is None or c.workspace:
        return ledger.refuse(key, "unknown_component", explain.unknown(ledger, asked.name))
    if c.session != key[0]:
        return ledger.refuse(key, "not_owner", explain.not_owner(ledger, c, "unregister"))
    if c.leases or c.answer is not None or c.renewal is not None:
        return ledger.refuse(key, "in_use", explain.in_use(ledger, c))
    _unregister(ledger, c, asked)


def _unregister(ledger: Ledger, c: Component, asked: Unregister) -> None:
    c.answer = asked.id
    registry.set_unregistering(ledger, c, True)
    admission.turn_away(ledger, c, explain.unregistered(ledger, c))
    if not ledger.is_current(c):
        return  # turn_away ended its last promise, and with it the component
    if c.state is State.RESIDENT or c.stoppable:
        transfers.go(ledger, c)
    elif c.state in (State.ABSENT, State.FILLING):
        registry.finish_unregister(ledger, c)
    ledger.replan |= c.name in ledger.prefetches  # other prefetches wait for it no longer


def on_forget(ledger: Ledger, key: Key, asked: Forget) -> None:
    host = ledger.host
    known = {uid: {c.name, c.part_of, c.content} for uid in host.kept for c in (host.owners[uid],)}
    for name in asked.names:
        if not any(name in names for names in known.values()):
            return ledger.refuse(key, "unknown_component", explain.not_kept(ledger, name))
    for uid, names in known.items():
        if not asked.names or not names.isdisjoint(asked.names):
            registry.forget(ledger, uid)
    ledger.accept(key)


# --- updates: a second host copy takes the place of the first ------------------------------


def _give_up(ledger: Ledger, renewal: Renewal) -> None:
    for one in renewal.together or (renewal,):
        if one.of.renewal is one:  # else its component went with the session that ends
            one.of.renewal = one.of.answer = None
            registry.let_go_of_host_copy(ledger, one.uid)


def _seal_together(ledger: Ledger, renewals: tuple[Renewal, ...], request: int) -> None:
    for one in renewals:
        one.of.answer, one.together = request, renewals
        registry.order_now(ledger, SealHostCopy(one.uid, one.of.name))


def _sealed(ledger: Ledger, renewal: Renewal) -> None:
    """Put all new host copies of a commit into effect once the last one is sealed."""
    renewal.sealed = True
    if all(one.sealed and one.of.renewal is one for one in renewal.together):
        registry.answer(ledger, renewal.of)
        for one in renewal.together:
            _renew(ledger, one)


def _renew(ledger: Ledger, renewal: Renewal) -> None:
    """The old bytes on the device leave at their last release."""
    c = renewal.of
    old, c.uid, c.renewal, c.answer = c.uid, renewal.uid, None, None
    c.updated_by = renewal.begun_by
    move = ledger.moves.get(c.generation)
    if not (move and move.uid == old):
        registry.let_go_of_host_copy(ledger, old)
    if c.state in (State.LOADING, State.RESIDENT):
        c.superseded = True
        ledger.superseded[c.name] = c
        transfers.settle(ledger, c)
        ledger.room_shrank = True  # holders of old bytes are in the way of waiters
    ledger.replan = True
