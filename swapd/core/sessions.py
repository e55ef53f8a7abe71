"""Opens, fences and ends sessions; changes the rules.

A debt is a duty with a deadline: to read messages, to acknowledge, to let go of lent memory. A
session that goes may leave copies in flight, and chunks to which its process can still write.
"""

from collections.abc import Iterable
from itertools import islice

import msgspec

from swapd.core import admission, explain, leases, prefetch, registry, transfers, twins
from swapd.core.actions import Fence, Lost, StopCopy
from swapd.core.chunks import count
from swapd.core.events import (
    DropAck,
    Dropping,
    ProcessExited,
    RulesChanged,
    SessionEnds,
    SessionGone,
    SessionOpened,
    Stopping,
    Tick,
    UnmapAck,
    Unread,
)
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Rules, Session, Transfer
from swapd.core.states import State
from swapd.shared.protocol import Runs

#: The debts to read the lifeline, and replies. Any other is to let go of lent memory, and has the
#: generation of the workspace.
LIFELINE, REPLIES = 0, -1


def on_session_opened(ledger: Ledger, event: SessionOpened) -> None:
    ledger.sessions[event.session] = Session(event.label)


def on_tick(ledger: Ledger, event: Tick) -> None:
    _fence_late(ledger)
    leases.refuse_late_starts(ledger)
    prefetch.expire(ledger)
    for due in ledger.host.contents.expired(event.now):
        registry.order(ledger, due)
    ledger.replan = True


def on_stopping(ledger: Ledger, event: Stopping) -> None:
    ledger.stopping = True
    ledger.prefetches.clear()
    registry.forget_all_but(ledger, 0)
    leases.refuse_waiting_starts(ledger)
    for w in list(ledger.queue):
        admission.refuse(ledger, w.key, "stopping", explain.STOPPING)


def on_session_ends(ledger: Ledger, event: SessionEnds) -> None:
    """End waiters first, so that they are granted nothing; then components, then leases."""
    left = event.most
    session = ledger.sessions.get(event.session)
    if session is None:
        return
    left -= _end_requests(ledger, event.session, islice(session.waiters, left))
    for name in list(islice(session.owns, left)):
        if left > 0:
            left -= _end(ledger, ledger.components[name], event, left)
    for request in list(islice(session.leases, max(left, 0))):
        leases.take_back(ledger, (event.session, request))
    ledger.replan = True


def _end_requests(ledger: Ledger, session: int, requests: Iterable[int]) -> int:
    ended = list(requests)
    for request in ended:
        if w := ledger.queue.get((session, request)):
            admission.forget(ledger, w)
    return len(ended)


def _end(ledger: Ledger, c: Component, event: SessionEnds, most: int) -> int:
    c.ending = True
    waiters = len(c.waiting) + len(c.promised)
    why = explain.owner_gone(c, ledger.sessions[c.session].label)
    admission.turn_away(ledger, c, why, most)
    if waiters > most or not ledger.is_current(c):
        return most
    _strand(ledger, c, event)
    return waiters + 1


def on_session_gone(ledger: Ledger, event: SessionGone) -> None:
    session = ledger.sessions.pop(event.session, None)
    if session is None:
        return
    for name in session.told:
        ledger.notices.wanted[name].discard(event.session)
    ledger.notices.hurried.discard(event.session)
    ledger.notices.unhurried.pop(event.session, None)
    _owe_nothing(ledger, event.session)
    leases.end_starts(ledger, event.session)
    prefetch.end_session(ledger, event.session)
    for c in session.makes_way.values():
        c.evicting_for = None
    owned = [ledger.components[name] for name in session.owns]
    for c in owned:
        _strand(ledger, c, event)
    _end_requests(ledger, event.session, session.waiters)
    for request in list(session.leases):
        leases.take_back(ledger, (event.session, request))
    for c in owned:
        admission.turn_away(ledger, c, explain.owner_gone(c, session.label))
    ledger.replan = True


def on_let_go(ledger: Ledger, event: ProcessExited | UnmapAck) -> None:
    end_quarantine(ledger, event.session)
    ledger.replan = True


# --- debts --------------------------------------------------------------------------------


def on_dropping(ledger: Ledger, event: Dropping) -> None:
    timeout_s = ledger.rules.ack_timeout_s
    for session in event.sessions:
        _owe(ledger, (session, event.generation), timeout_s, kept_what_is_lent(timeout_s))


def on_dropped(ledger: Ledger, event: DropAck) -> None:
    _settle(ledger, (event.session, event.generation))


def on_unread(ledger: Ledger, event: Unread) -> None:
    """Each message that the session reads gives it the whole time again."""
    what = LIFELINE if event.channel == "lifeline" else REPLIES
    debt = event.session, what
    if not event.count:
        return _settle(ledger, debt)
    timeout_s, error = ledger.rules.unread_timeout_s, event.error
    _owe(ledger, debt, timeout_s, unsent(error, timeout_s) if error else unread(what, timeout_s))


def _owe(ledger: Ledger, debt: tuple[int, int], timeout_s: float, why: str) -> None:
    known = ledger.sessions.get(debt[0])
    if known is not None and not known.fenced:
        ledger.debts.set(debt, ledger.now + timeout_s)
        ledger.debt_causes[debt] = ledger.now, why


def _settle(ledger: Ledger, debt: tuple[int, int]) -> None:
    ledger.debts.drop(debt)
    ledger.debt_causes.pop(debt, None)


def _owe_nothing(ledger: Ledger, session: int) -> None:
    for debt in [debt for debt in ledger.debt_causes if debt[0] == session]:
        _settle(ledger, debt)


def _fence_late(ledger: Ledger) -> None:
    while ledger.acks:
        since, c = next(iter(ledger.acks.values()))
        deadline = since + ledger.rules.ack_timeout_s
        if deadline > ledger.now:
            break
        del ledger.acks[c.generation]
        _fence(ledger, c.session, unacknowledged(c, ledger.rules.ack_timeout_s))
    for debt in ledger.debts.over(ledger.now):
        if debt in ledger.debts:  # a fence for another debt may have dropped it
            _fence(ledger, debt[0], ledger.debt_causes[debt][1])


def _fence(ledger: Ledger, number: int, why: str) -> None:
    session = ledger.sessions[number]
    if not session.fenced:
        session.fenced = True
        _owe_nothing(ledger, number)
        ledger.out.append(Fence(number, why))


# --- rules --------------------------------------------------------------------------------


def on_rules_changed(ledger: Ledger, event: RulesChanged) -> None:
    """The new rules apply to existing debts, too: some may be overdue at once."""
    changed = msgspec.structs.asdict(event)
    del changed["now"]
    ledger.rules = msgspec.structs.replace(ledger.rules, **changed)
    registry.forget_all_but(ledger, event.keep_host)
    ledger.queue.patience_s = event.patience_s
    why = kept_what_is_lent(event.ack_timeout_s)
    for (session, what), (since, _) in ledger.debt_causes.items():
        if what not in (LIFELINE, REPLIES):
            ledger.debts.set((session, what), since + event.ack_timeout_s)
            ledger.debt_causes[session, what] = since, why
    ledger.replan = True


# --- what is left behind --------------------------------------------------------------------


def _strand(ledger: Ledger, c: Component, end: SessionEnds | SessionGone) -> None:
    """Free what can be freed now of a component whose owner is gone; a copy in flight keeps the
    rest."""
    if c.unsaved:
        ledger.out.append(Lost(c.name, c.generation, explain.lost(c)))
    leases.take_from_all(ledger, c)
    transfers.makes_way_no_more(ledger, c)
    if c.workspace:
        transfers.close_workspace(ledger, c)
        if ledger.is_current(c):
            registry.remove(ledger, c)
        return
    ledger.acks.pop(c.generation, None)
    move = ledger.moves.get(c.generation)
    if c.on_device:
        twins.leave(ledger, c)
    writer = _writer(ledger, c, end)
    if move and move.lane is None:
        ledger.pool.give(c.runs)  # nothing is copied there
        c.runs = ()
    elif move:
        move.writer = writer
        if c.state is State.LOADING:
            ledger.out.append(StopCopy(c.name, c.generation))
    elif c.on_device:
        _free(ledger, c.runs, writer)
    registry.remove(ledger, c)
    _drop_host_copies(ledger, c, move)


def _drop_host_copies(ledger: Ledger, c: Component, move: Transfer | None) -> None:
    """A host copy that `move` uses goes when `move` ends."""
    if not (move and move.uid == c.uid):
        registry.let_go_of_host_copy(ledger, c.uid)
    if c.renewal is not None:
        registry.let_go_of_host_copy(ledger, c.renewal.uid)
        c.renewal = None


def _writer(ledger: Ledger, c: Component, end: SessionEnds | SessionGone) -> int | None:
    """Return its session, in quarantine from now on, if the process may still write to `c`; else
    None."""
    # unsaved bytes exist only on the device: the process may go on with them there
    unsaved = c.dirty and c.state is State.RESIDENT
    if not (end.alive and c.mutable and (c.mapped or unsaved)):
        return None
    ledger.quarantined.setdefault(c.session, [])  # a copy in flight may add chunks when it ends
    if end.ending:
        ledger.dying.add(c.session)
    return c.session


def abandon(ledger: Ledger, move: Transfer) -> None:
    _free(ledger, move.component.runs, move.writer)
    registry.let_go_of_host_copy(ledger, move.uid)
    ledger.replan = True


def _free(ledger: Ledger, runs: Runs, writer: int | None) -> None:
    """Quarantine the chunks if `writer` may still write to them."""
    if writer in ledger.quarantined:
        ledger.quarantined[writer].append(runs)
        if writer in ledger.dying:
            ledger.leaving += count(runs)
        else:
            ledger.fixed += count(runs)
            ledger.room_shrank = True
    else:
        ledger.pool.give(runs)


def end_quarantine(ledger: Ledger, session: int) -> None:
    """The process of the session has ended, or has unmapped the chunks."""
    for runs in ledger.quarantined.pop(session, ()):
        if session in ledger.dying:
            ledger.leaving -= count(runs)
        else:
            ledger.fixed -= count(runs)
        ledger.pool.give(runs)
    ledger.dying.discard(session)


# --- messages to fenced sessions ------------------------------------------------------------


def unacknowledged(c: Component, timeout_s: float) -> str:
    return (
        f"gave no acknowledgement within {timeout_s:g} s that {c.name!r} is unmapped; its session "
        f"is ended, connect again. {_more_time(timeout_s)}"
    )


def kept_what_is_lent(timeout_s: float) -> str:
    return (
        f"did not let go of memory lent to others within {timeout_s:g} s; its session is ended, "
        f"connect again. {_more_time(timeout_s)}"
    )


def _more_time(ack_timeout_s: float) -> str:
    longer = max(4 * ack_timeout_s, Rules().ack_timeout_s)
    return (
        "If its process was not stopped or stuck but busy (importing, compiling, collecting a "
        f"large heap: all that keeps the GIL), give it longer: swapd serve --ack-timeout {longer:g}"
    )


def unread(what: int, timeout_s: float) -> str:
    things = "messages" if what == LIFELINE else "replies"
    return (
        f"does not read: {things} are kept for it, and none taken in {timeout_s:g} s; its session "
        "is ended, connect again. Its process was stopped, or its threads cannot run"
    )


def unsent(error: str, timeout_s: float) -> str:
    return (
        f"cannot be sent its messages for {timeout_s:g} s: {error}; its session is ended, connect "
        "again. If descriptors are missing, raise the daemon's `ulimit -n` (LimitNOFILE in a unit)"
    )
