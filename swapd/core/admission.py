"""The life of an acquire: parked while a name is not registered, queued while it needs memory,
admitted when its components are resident or loading and promised to it, then granted; or refused,
in each state. `eviction.py` says whether there is room, `planner.py` whose turn it is."""

from itertools import islice
from operator import attrgetter

from swapd.core import (
    deadlock,
    eviction,
    explain,
    leases,
    prefetch,
    requests,
    sharing,
    transfers,
)
from swapd.core.actions import Grant, Waiting
from swapd.core.eta import BEHIND, eta
from swapd.core.eviction import Refusal
from swapd.core.ledger import Ledger
from swapd.core.queue import LOOKED_AT
from swapd.core.records import Component, Key, Waiter, is_workspace, workspace_name
from swapd.core.states import State
from swapd.shared.protocol import NUMBER_MAX, Acquire, AcquireWorkspace, Cancel, Code

_seq = attrgetter("seq")


# --- requests ----------------------------------------------------------------------------


def on_acquire(ledger: Ledger, key: Key, asked: Acquire) -> None:
    if leases.is_replayed(ledger, key):
        return ledger.refuse(key, "bad_request", explain.REPLAYED)
    leases.note_use(ledger, (key[0], asked.agent), asked.holds)
    due = 0 if asked.due_s is None else requests.due(asked.due_s, ledger.now)
    w = _waiter(ledger, key, asked, asked.names, due)
    w.await_registration, w.early = asked.await_registration, asked.early
    w.overtake = asked.overtake
    missing = [n for n in w.names if not ledger.may_be_acquired(n)]
    if missing:
        missing.sort(key=lambda n: not is_workspace(n))
        if not w.await_registration or is_workspace(missing[0]):
            return ledger.refuse(
                key, "unknown_component", explain.not_to_acquire(ledger, missing[0])
            )
    _ask(ledger, w, missing)


def on_acquire_workspace(ledger: Ledger, key: Key, asked: AcquireWorkspace) -> None:
    returning = workspace_name(*key) in ledger.components  # its memory is on its way back
    if returning or leases.is_replayed(ledger, key):
        return ledger.refuse(key, "bad_request", explain.REPLAYED)
    chunks = ledger.chunks_for(asked.nbytes)
    name = transfers.open_workspace(ledger, key, asked.nbytes, chunks)
    leases.note_use(ledger, (key[0], asked.agent), asked.holds)
    _ask(ledger, _waiter(ledger, key, asked, (name,)), [])


def _waiter(
    ledger: Ledger,
    key: Key,
    asked: Acquire | AcquireWorkspace,
    names: tuple[str, ...],
    due: int = 0,
) -> Waiter:
    ledger.arrivals += 1
    return Waiter(
        *key,
        agent=asked.agent,
        asked=names,
        names=ledger.expand(names),
        priority=asked.priority,
        deadline=requests.deadline(asked.timeout_s, ledger.now),
        arrived=ledger.now,
        seq=ledger.arrivals,
        due=due,
        spare=asked.spare,
    )


def on_cancel(ledger: Ledger, key: Key, asked: Cancel) -> None:
    cancelled = key[0], asked.acquire
    if w := ledger.queue.get(cancelled):
        forget(ledger, w)
    elif not leases.end_start(ledger, cancelled):
        leases.take_back(ledger, cancelled)


# --- in ----------------------------------------------------------------------------------


def _ask(ledger: Ledger, w: Waiter, missing: list[str]) -> None:
    ledger.queue.add(w)
    ledger.sessions[w.session].waiters.add(w.request)
    if missing and sharing.is_late(ledger, w):
        _refuse_late(ledger, w)
    elif missing:
        ledger.queue.park(w)
        tell_waiting(ledger, w, explain.parked(missing))
    else:
        _enter(ledger, w)


def unpark(ledger: Ledger, c: Component) -> None:
    for w in ledger.queue.awaiting(c.name, c.side):
        w.names = ledger.expand(w.asked)
        # admitting an earlier one may have had this one refused
        if w.parked and all(ledger.may_be_acquired(n) for n in w.names):
            ledger.queue.leave(w)
            _enter(ledger, w)


def _enter(ledger: Ledger, w: Waiter) -> None:
    """All names are registered."""
    asked = ledger.named(w.names)
    if ledger.predicted:
        prefetch.note_asked(ledger, asked)
    if w.spare and prefetch.lacks_room(ledger, asked):
        _spend(ledger, w)
    found = sharing.at_once(ledger, w, asked)
    if isinstance(found, Refusal):
        return refuse_as(ledger, w, found)
    _note_gaps(ledger, asked)
    if found:
        ledger.replan |= ledger.somebody_waits and sharing.is_missed(ledger, w, asked)
        return admit(ledger, w)
    if sharing.is_late(ledger, w):
        return _refuse_late(ledger, w)
    _push(ledger, w, asked)
    freed = _spend(ledger, w)
    if w.spent and eviction.fits_in(ledger, asked, freed):
        return admit(ledger, w)  # before anybody else gets the room of its leases
    _have_it_wait(ledger, w, asked)


def _push(ledger: Ledger, w: Waiter, asked: list[Component]) -> None:
    ledger.queue.push(w)
    for c in asked:
        if c.state in (State.RESIDENT, State.LOADING):
            ledger.held_back[c.name] = None
            closed = c.name in ledger.in_the_way
            ledger.replan |= not c.waiting if closed else ledger.closed_from is not None
        c.waiting[w.key] = None


def _have_it_wait(ledger: Ledger, w: Waiter, asked: list[Component]) -> None:
    """Decide again if the new waiter may change a decision; otherwise record that it waits."""
    queue = ledger.queue
    if w.owner in ledger.holders.by_agent:
        queue.push_holding(w)
        refuse_deadlocked(ledger)
        ledger.replan = True
    elif queue.head(ledger.now) is w:
        ledger.replan = True
    elif len(queue.queued) > LOOKED_AT or not eviction.may_come_in(ledger, asked):
        tell_waiting(ledger, w)  # it cannot go beside the head: see planner.candidates
    else:
        queue.untold[w.key] = w
        ledger.replan = True


def _spend(ledger: Ledger, w: Waiter) -> int:
    """End the leases in `w.spare`; return the chunks freed."""
    free = ledger.pool.free
    spared, w.spare = w.spare, ()
    for spare in spared:
        w.spent = True
        leases.release(ledger, w.session, spare)
    return ledger.pool.free - free


def _note_gaps(ledger: Ledger, asked: list[Component]) -> None:
    for c in asked:
        if c.released_at is not None:
            c.gap_s = ledger.now - c.released_at
            c.released_at = None
            # its minimum residency may be over
            ledger.replan |= c.state is not State.ABSENT and ledger.somebody_waits


def share(ledger: Ledger, c: Component) -> None:
    """Admit the waiters for `c` that need no memory now."""
    ledger.held_back.pop(c.name, None)
    for key in list(c.waiting):
        w = ledger.queue.get(key)
        if w is None or not w.queued:
            continue  # admitted along with an earlier one
        asked = ledger.named(w.names)
        if sharing.may_share(ledger, w, asked):
            admit(ledger, w)
            ledger.replan = True
            continue
        for closed in (other for other in asked if not sharing.may_join(ledger, other, w)):
            hold_back(ledger, closed)
            if closed is c:
                return  # nor may those that came later


def share_with_one(ledger: Ledger, c: Component) -> None:
    """Admit one waiter for `c`: its holders may wait for that one, which the daemon cannot see."""
    for key in list(c.waiting):
        w = ledger.queue.get(key)
        if w is not None and sharing.may_share(ledger, w, ledger.named(w.names)):
            ledger.replan = True
            return admit(ledger, w)


def hold_back(ledger: Ledger, c: Component) -> None:
    ledger.replan |= ledger.closed_from is None or c.name not in ledger.held_back
    ledger.held_back[c.name] = None


def admit(ledger: Ledger, w: Waiter) -> None:
    """Promise `w` all its components, and start the loads. An early acquire does not wait for loads
    of its own session, whose worker watches them arrive."""
    _leave_queue(ledger, w)
    ledger.queue.admitted(w, ledger.now)
    if ledger.now >= w.arrived + ledger.queue.patience_s:
        w.order = (-NUMBER_MAX, 0, w.seq)  # its patience is over: its loads go first, too
    w.admitted = True
    asked = ledger.named(w.names)
    for c in asked:  # all before the first load: it may have an idle twin leave
        c.promised[w.key] = None
        ledger.idle.drop(c)
    for c in asked:
        _bring_in(ledger, w, c)
    if not w.pending:
        _grant(ledger, w)


def _bring_in(ledger: Ledger, w: Waiter, c: Component) -> None:
    if c.state is State.ABSENT:
        transfers.load(ledger, c)
        if c.waiting:
            hold_back(ledger, c)  # other waiters may share the load
    elif c.state is State.LOADING and not c.workspace:
        transfers.hasten(ledger, c, min(c.urgency, (0, *w.order)))
    if c.state is State.LOADING:
        w.loaded |= not (c.workspace or c.joined)
        if not (w.early and c.session == w.session):
            w.pending.add(c.name)
    if c.state is not State.LOADING or c.joined:
        ledger.count_hits(c, 1)


def let_in(ledger: Ledger, c: Component) -> None:
    """Grant the waiters that waited only for `c`, which came in."""
    for key in list(c.promised):
        w = ledger.queue.get(key)
        assert w is not None
        w.pending.discard(c.name)
        if not w.pending:
            _grant(ledger, w)


def _grant(ledger: Ledger, w: Waiter) -> None:
    ledger.queue.forget(w)
    ledger.sessions[w.session].waiters.discard(w.request)
    placements = leases.lend(ledger, w)
    names = () if w.asked == w.names else w.names
    waited_s = ledger.now - w.arrived
    ledger.count_wait(w.asked, waited_s)
    ledger.out.append(Grant(*w.key, placements, waited_s, w.loaded, names, w.spent, w.overtaken))
    _let_go_on(ledger, w)


def _let_go_on(ledger: Ledger, w: Waiter) -> None:
    """Admit other waiters that may share what `w` was granted: of its agent, and those that take
    old bytes."""
    for other in ledger.queue.beside(w):
        asked = ledger.named(other.names)
        if sharing.may_share(ledger, other, asked):
            ledger.replan = True
            admit(ledger, other)
        for c in asked if other.queued else ():
            if not sharing.may_join(ledger, c, other):
                hold_back(ledger, c)


def tell_waiting(ledger: Ledger, w: Waiter, why: str = "") -> None:
    if not w.why:
        ledger.queue.untold.pop(w.key, None)
        w.why = why or explain.blocked(ledger, w, most=3)
        ledger.out.append(Waiting(w.session, w.request, w.asked, w.why))


# --- out ---------------------------------------------------------------------------------


def refuse(ledger: Ledger, key: Key, code: Code, message: str, *, tried: bool = False) -> None:
    if w := ledger.queue.get(key):
        forget(ledger, w)
        ledger.refuse(key, code, message, tried=tried, names=w.asked)


def refuse_as(ledger: Ledger, w: Waiter, found: Refusal) -> None:
    refuse(ledger, w.key, found.code, explain.refused(ledger, found), tried=_only_tries(w))


def forget(ledger: Ledger, w: Waiter) -> None:
    """What was promised to the waiter becomes idle."""
    _leave_queue(ledger, w)
    ledger.queue.forget(w)
    if session := ledger.sessions.get(w.session):
        session.waiters.discard(w.request)
    for name in w.names:
        c = ledger.components.get(name)
        if c is not None and w.key in c.promised:
            c.promised.pop(w.key, None)
            transfers.settle(ledger, c)
        if c is not None and c.workspace:
            transfers.close_workspace(ledger, c)
    _drop_done_with(ledger, w)
    ledger.replan = True


def refuse_late(ledger: Ledger) -> None:
    for w in ledger.queue.expired(ledger.now):
        _refuse_late(ledger, w)


def _refuse_late(ledger: Ledger, w: Waiter) -> None:
    tries = _only_tries(w)
    # tries may come by the thousand, and to compute an ETA for each would delay everybody
    expected = BEHIND if tries and ledger.queue.queued else eta(ledger, w, ledger.now)
    why = explain.timeout(ledger, w, ledger.now, str(expected))
    refuse(ledger, w.key, "timeout", why, tried=tries)


def _only_tries(w: Waiter) -> bool:
    return w.deadline == w.arrived


def turn_away(ledger: Ledger, c: Component, why: str, most: int | None = None) -> None:
    """Refuse the waiters for `c`, which goes away, or park those with `await_registration`.

    At most `most` of them, the queued ones first.
    """
    keys = islice((*c.waiting, *c.promised), most)
    waiters = [ledger.queue.get(key) for key in keys]
    for w in sorted((w for w in waiters if w is not None), key=_seq):
        if w.await_registration and not w.admitted:
            _leave_queue(ledger, w)
            _drop_done_with(ledger, w)
            ledger.queue.park(w)
            ledger.replan = True
        else:
            refuse(ledger, w.key, "component_gone", why)


def _leave_queue(ledger: Ledger, w: Waiter) -> None:
    if w.queued:
        for name in w.names:
            if c := ledger.components.get(name):
                c.waiting.pop(w.key, None)
    ledger.queue.leave(w)


def _drop_done_with(ledger: Ledger, w: Waiter) -> None:
    for name in w.names:
        c = ledger.components.get(name)
        if c is not None and name in ledger.idle:
            transfers.go(ledger, c)


def refuse_deadlocked(ledger: Ledger) -> None:
    """Refuse waiters, newest first, until all agents that hold and wait can finish. A waiter for
    new bytes whose session holds the old ones gets these instead: without the update it would not
    wait."""
    while stuck := deadlock.deadlocked(ledger):
        if w := deadlock.that_could_take_old(ledger, stuck):
            ledger.queue.take_old(w)
            if sharing.may_share(ledger, w, ledger.named(w.names)):
                admit(ledger, w)
            ledger.replan = True
            continue
        newest = max(stuck, key=_seq)
        refuse(ledger, newest.key, "deadlock", explain.deadlock(ledger, newest, stuck))
