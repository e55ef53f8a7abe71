"""A component from its registration to its end, and its host copies."""

from bisect import insort

import msgspec

from swapd.core import requests
from swapd.core.actions import DropHostCopy, MakeHostCopy, SealHostCopy
from swapd.core.contents import Due
from swapd.core.ledger import Ledger, drop_member
from swapd.core.records import Component
from swapd.shared.protocol import Register

#: A session that fills bytes that others share may take this long, plus the time that a slow disk
#: takes for them; then the others fill their own.
SHARE_PATIENCE_S = 30.0
SLOWEST_BYTES_PER_S = 100e6


def register(ledger: Ledger, session: int, asked: Register, chunks: int) -> None:
    c = Component(
        ledger.next_uid(),
        asked.name,
        session,
        asked.nbytes,
        chunks,
        "sequential" if asked.transient else asked.policy,
        asked.group,
        asked.mutable,
        part_of=asked.part_of,
        own_policy=asked.policy,
        scratch=asked.scratch,
        kept=() if asked.scratch and not asked.filled else None,
        to_save=() if asked.scratch == "dropped" else None,
        tally=ledger.know(asked.part_of or asked.name),
    )
    ledger.components[c.name] = c
    change_staying(ledger, c, 1)
    insort(ledger.names, c.name)
    ledger.foresight.know(c.side)
    if c.part_of:
        if c.part_of not in ledger.families:
            insort(ledger.names, c.part_of)
        ledger.families.setdefault(c.part_of, {})[c.name] = c
    ledger.sessions[c.session].owns[c.name] = None
    c.answer = asked.id
    make_host_copy(ledger, c, c.uid, asked.id, asked.segments, requests.content(asked))


def change_staying(ledger: Ledger, c: Component, sign: int) -> None:
    """Count the component with those that never leave once they are in, if it is one."""
    if c.policy == "permanent":
        ledger.staying += sign * c.chunks
        ledger.room_differs = True


def make_host_copy(
    ledger: Ledger,
    c: Component,
    uid: int,
    request: int,
    segments: tuple[int, ...] = (),
    content: str = "",
) -> None:
    """Order a host copy, either at once or when another one has the bytes that this one shares."""
    ledger.host.owners[uid] = c
    replaces = c.uid if c.uid != uid else 0
    ledger.host.unordered[uid] = MakeHostCopy(
        c.session,
        uid,
        c.name,
        c.nbytes,
        c.mutable,
        segments,
        request,
        replaces=replaces,
        empty=c.scratch == "dropped",
    )
    if not content:
        return order(ledger, Due(uid))
    until = ledger.now + SHARE_PATIENCE_S + c.nbytes / SLOWEST_BYTES_PER_S
    due = ledger.host.contents.ask(uid, c.session, (content, c.nbytes), until)
    if due is not None:
        order(ledger, due)


def order(ledger: Ledger, due: Due) -> None:
    """Order the host copy that waited for this."""
    ledger.host.making.add(due.uid)
    action = ledger.host.unordered.pop(due.uid)
    ledger.out.append(msgspec.structs.replace(action, original=due.original))


def seal(ledger: Ledger, c: Component, uid: int) -> None:
    ledger.host.making.add(uid)
    ledger.out.append(SealHostCopy(uid, c.name))


def drop_host_copy(ledger: Ledger, uid: int) -> None:
    """No component uses this host copy any more: drop it, now or as soon as it is made or
    sealed."""
    if uid not in ledger.host.making:
        c = ledger.host.owners.pop(uid)
        if ledger.host.unordered.pop(uid, None) is None:
            ledger.out.append(DropHostCopy(uid, c.name))
    for due in ledger.host.contents.gone(uid):
        order(ledger, due)


def answer(ledger: Ledger, c: Component) -> None:
    """Accept the register, commit or unregister that waited for this."""
    assert c.answer is not None
    ledger.accept((c.session, c.answer))
    c.answer = None


def set_unregistering(ledger: Ledger, c: Component, going: bool) -> None:
    """The component goes as soon as it can, or stays after all."""
    c.unregistering = going
    ledger.recount(c)


def finish_unregister(ledger: Ledger, c: Component) -> None:
    answer(ledger, c)
    remove(ledger, c)
    drop_host_copy(ledger, c.uid)


def remove(ledger: Ledger, c: Component) -> None:
    """Free the name. The caller settles the chunks and the host copy."""
    del ledger.components[c.name]
    if session := ledger.sessions.get(c.session):
        session.owns.pop(c.name, None)
        if c.name in session.turn:
            del session.turn[c.name]
            session.turn_chunks -= c.chunks
    change_staying(ledger, c, -1)
    ledger.idle.drop(c)
    ledger.recount(c)
    ledger.expiries.drop(c.name)
    if c.name in ledger.prefetches:
        del ledger.prefetches[c.name]
        ledger.replan = True  # others may have been held back for it
    ledger.superseded.pop(c.name, None)
    ledger.unwant(c.name)
    if c.workspace:
        return
    ledger.forget(c.name)
    drop_member(ledger.families, c.part_of, c)
    if c.part_of and c.part_of not in ledger.families:
        ledger.forget(c.part_of)
        ledger.automatic.pop(c.part_of, None)
