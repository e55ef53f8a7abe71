"""Adds and removes components and their host copies."""

from bisect import insort

import msgspec

from swapd.core import requests
from swapd.core.actions import DropHostCopy, KeepHostCopy, MakeHostCopy, SealHostCopy
from swapd.core.contents import DueHostCopy
from swapd.core.ledger import Ledger, drop_member
from swapd.core.records import Component
from swapd.shared.protocol import Register

#: Longest time to wait for the bytes of another, plus the time of a slow disk for them.
SHARE_PATIENCE_S = 30.0
SLOWEST_BYTES_PER_S = 100e6
#: Most kept host copies. Each takes a file descriptor of the daemon.
KEPT_MAX = 256


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
        content=asked.content,
        layout=asked.layout,
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
        ledger.room_differs |= c.part_of in ledger.automatic
    ledger.sessions[c.session].owns[c.name] = None
    c.answer = asked.id
    content = requests.content(asked)
    make_host_copy(ledger, c, c.uid, asked.id, asked.segments, content, certain=asked.certain)


def change_staying(ledger: Ledger, c: Component, sign: int) -> None:
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
    *,
    certain: bool = False,
) -> None:
    """Order a host copy, at once or when the bytes that it shares are filled."""
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
        return order(ledger, DueHostCopy(uid))
    until = ledger.now + SHARE_PATIENCE_S + c.nbytes / SLOWEST_BYTES_PER_S
    key = content, c.nbytes
    due = ledger.host.contents.ask(uid, c.session, key, until, certain=certain)
    if due is not None:
        order(ledger, due)


def order(ledger: Ledger, due: DueHostCopy) -> None:
    action = ledger.host.unordered.pop(due.uid)
    certain = due.certain and ledger.rules.keep_host > 0
    order_now(ledger, msgspec.structs.replace(action, original=due.original, certain=certain))
    if due.original in ledger.host.kept:
        forget(ledger, due.original)  # in use again; the last sharer may be kept


def order_now(ledger: Ledger, order: MakeHostCopy | SealHostCopy) -> None:
    ledger.host.making[order.uid] = order
    ledger.out.append(order)


def let_go_of_host_copy(ledger: Ledger, uid: int) -> None:
    """Keep a host copy that no component uses if it may serve another, else drop it, once it is
    made or sealed."""
    host, most = ledger.host, 0 if ledger.stopping else ledger.rules.keep_host
    nbytes = host.owners[uid].nbytes
    if uid in host.making or not host.contents.is_last(uid) or not 0 < nbytes <= most:
        return _drop(ledger, uid)
    ledger.out.append(KeepHostCopy(uid, host.owners[uid].name))
    host.kept[uid] = None
    host.kept_bytes += nbytes
    forget_all_but(ledger, most)


def forget_all_but(ledger: Ledger, most: int) -> None:
    """The least recently used go first."""
    host = ledger.host
    while host.kept_bytes > most or len(host.kept) > KEPT_MAX:
        forget(ledger, next(iter(host.kept)))


def forget_doubles(ledger: Ledger) -> None:
    """Drop kept host copies whose content another one has by now."""
    host = ledger.host
    for uid in [uid for uid in host.kept if not host.contents.is_last(uid)]:
        forget(ledger, uid)


def forget(ledger: Ledger, uid: int) -> None:
    del ledger.host.kept[uid]
    ledger.host.kept_bytes -= ledger.host.owners[uid].nbytes
    _drop(ledger, uid)


def _drop(ledger: Ledger, uid: int) -> None:
    if uid not in ledger.host.making:
        c = ledger.host.owners.pop(uid)
        if ledger.host.unordered.pop(uid, None) is None:
            ledger.out.append(DropHostCopy(uid, c.name))
    for due in ledger.host.contents.gone(uid):
        order(ledger, due)


def answer(ledger: Ledger, c: Component) -> None:
    assert c.answer is not None
    ledger.accept((c.session, c.answer))
    c.answer = None


def set_unregistering(ledger: Ledger, c: Component, going: bool) -> None:
    c.unregistering = going
    ledger.recount(c)


def finish_unregister(ledger: Ledger, c: Component) -> None:
    answer(ledger, c)
    remove(ledger, c)
    let_go_of_host_copy(ledger, c.uid)


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
        ledger.replan = True  # other prefetches may have waited for it
    ledger.superseded.pop(c.name, None)
    ledger.unwant(c.name)
    if c.workspace:
        return
    ledger.forget(c.name)
    drop_member(ledger.families, c.part_of, c)
    ledger.room_differs |= c.part_of in ledger.automatic
    if c.part_of and c.part_of not in ledger.families:
        ledger.forget(c.part_of)
        ledger.automatic.pop(c.part_of, None)
