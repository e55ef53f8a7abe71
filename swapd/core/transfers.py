"""How a component comes in, how it leaves the device, and when it does so on its own.

The planner decides which components leave to make room for others.
"""

from collections.abc import Iterable

from swapd.core import policy, registry, telling, workspaces
from swapd.core.actions import CopyIn, CopyOut, Evict, Evicted, Lend, Lost, Reason, Revoke, Unpinned
from swapd.core.chunks import count
from swapd.core.counts import observe
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Key, Move
from swapd.core.states import State
from swapd.shared.protocol import Histogram


def load(ledger: Ledger, c: Component) -> None:
    c.generation = ledger.next_generation()
    c.enter(State.LOADING)
    c.load_started = ledger.now
    c.used = c.kept_no_more = False
    c.runs = ledger.pool.take(c.chunks, prefer=c.runs)
    lane = None if c.workspace else ledger.lane_in
    ledger.moves[c.generation] = Move(c, c.uid, c.runs, ledger.now, lane)
    ledger.recount(c)
    in_use = ledger.pool.total - ledger.pool.free
    ledger.peak_chunks = max(ledger.peak_chunks, in_use)
    ledger.prefetches.pop(c.name, None)
    if c.policy == "permanent":
        ledger.room_shrank = ledger.replan = True
    if c.workspace:
        ledger.out.append(Lend(c.session, c.name, c.generation, c.runs, in_use))
    else:
        if c.kept == ():
            c.contents = c.generation
        order = CopyIn(c.uid, c.name, c.generation, c.nbytes, c.runs, c.kept, in_use)
        ledger.out.append(order)


def copied(ledger: Ledger, move: Move, nbytes: int, times: Histogram) -> float:
    """Count a copy that has ended; return its seconds without the wait for earlier ones."""
    lane, now = move.lane, ledger.now
    assert lane is not None
    observe(times, now - move.began)
    alone_s = now - max(move.began, lane.ended_at)
    if nbytes and alone_s > 0:
        lane.bytes_per_s = nbytes / alone_s
    lane.nbytes += nbytes
    lane.ended_at = now
    return alone_s


def loaded(ledger: Ledger, c: Component, copy_s: float | None = None) -> None:
    """It is on the device: its copy took `copy_s`, or it is a workspace."""
    c.enter(State.RESIDENT)
    c.resident_since = ledger.now
    c.swap_in_s = ledger.now - c.load_started
    ledger.holders.rank(c)
    if not c.workspace:
        c.copy_s = copy_s
        c.loads += 1
        c.tally.loads += 1
        ledger.loads += 1


def load_failed(ledger: Ledger, c: Component) -> None:
    """The component is absent again, if need be once its worker has let go of the chunks."""
    c.dirty = False  # the worker's writes during the load are not worth keeping
    if c.mapped:
        return evict(ledger, c, "failed", None)
    ledger.pool.give(c.runs)
    ledger.drop_superseded(c)
    c.enter(State.ABSENT)
    ledger.recount(c)
    if c.unregistering:
        registry.finish_unregister(ledger, c)


def settle(ledger: Ledger, c: Component) -> None:
    """After a lease, a promise or a load ended: idle if no request needs it now, or gone."""
    if c.state is not State.RESIDENT or c.leases or c.promised:
        return
    if c.workspace:
        workspaces.close(ledger, c)
    elif not go(ledger, c):
        make_idle(ledger, c)
    ledger.replan = True


def go(ledger: Ledger, c: Component) -> bool:
    """Make `c`, which has no holder, leave if `policy.goes_now`; return whether it does."""
    reason = policy.goes_now(c, down=bool(ledger.down))
    if reason is not None:
        evict(ledger, c, reason, None)
    return reason is not None


def set_kept(ledger: Ledger, c: Component, kept: bool) -> None:
    """A part gets its own policy, or becomes `sequential`."""
    before, c.policy = c.policy, c.own_policy if kept else "sequential"
    if c.policy == before:
        return
    ledger.room_differs |= "permanent" in (before, c.policy)
    ledger.room_shrank |= c.policy == "permanent"
    ledger.staying += c.chunks if c.policy == "permanent" else 0
    ledger.staying -= c.chunks if before == "permanent" else 0
    ledger.recount(c)
    ledger.holders.rank(c)
    ledger.replan = True
    is_idle = c.state is State.RESIDENT and not (c.leases or c.promised)
    c.kept_no_more = is_idle and not kept
    if is_idle and not go(ledger, c):
        ledger.idle.drop(c)
        make_idle(ledger, c)


def set_pinned(ledger: Ledger, c: Component, pinned: bool) -> None:
    """Pin or unpin. A pinned component stays once it is in. A part that its family does not keep is
    still `sequential`."""
    if c.pinned == pinned:
        return
    kept = c.policy == c.own_policy
    if c.unpinned_policy is None:
        c.unpinned_policy, c.own_policy = c.own_policy, "permanent"
        ledger.pinned[c.name] = c
    else:
        c.own_policy, c.unpinned_policy = c.unpinned_policy, None
        del ledger.pinned[c.name]
    set_kept(ledger, c, kept)


def unpin_for(ledger: Ledger, key: Key, going: Iterable[Component]) -> None:
    """Unpin these, because this request could never be granted beside them."""
    for c in going:
        set_pinned(ledger, c, pinned=False)
        ledger.out.append(Unpinned(c.name, *key))


def make_idle(ledger: Ledger, c: Component) -> None:
    c.idle_since = ledger.now
    if c.policy != "permanent":
        ledger.idle.add(c)


def evict(ledger: Ledger, c: Component, reason: Reason, key: Key | None) -> None:
    """`c` leaves now, or when its worker has let go of it."""
    ledger.idle.drop(c)
    telling.unwant(ledger, c.name)
    ledger.drop_superseded(c)
    c.reason, c.evicting_for = reason, key
    if key is not None:
        ledger.sessions[key[0]].makes_way[c.generation] = c
    ledger.leaving += count(c.runs)
    ledger.replan = True
    c.enter(State.REVOKING)
    ledger.out.append(Evict(c.name, c.generation, reason, key))
    ack = c.mapped and (ledger.rules.strict or c.mutable)
    if c.mapped:
        ledger.out.append(Revoke(c.session, c.name, c.generation, ack))
    if ack:
        ledger.acks[c.generation] = (ledger.now, c)
    else:
        take_out(ledger, c)


def take_out(ledger: Ledger, c: Component) -> None:
    """The worker can no longer write: save its writes, or just drop the component."""
    c.mapped = False
    if c.unsaved:
        _save(ledger, c)
    else:
        forget(c)
        vacate(ledger, c, bytes_back=0)


def _save(ledger: Ledger, c: Component) -> None:
    c.enter(State.WRITING_BACK)
    ledger.moves[c.generation] = Move(c, c.uid, c.runs, ledger.now, ledger.lane_out)
    ledger.out.append(CopyOut(c.uid, c.name, c.generation, c.nbytes, c.runs, c.to_save))


def saved(c: Component) -> None:
    """The writes of its worker are in the host copy."""
    c.dirty = False
    if c.scratch:
        c.kept = c.to_save


def forget(c: Component) -> None:
    """It leaves without a save. For scratch that is intended."""
    if c.dirty and c.scratch:
        c.kept, c.dirty = (), False


def vacate(ledger: Ledger, c: Component, bytes_back: int) -> None:
    """It has left, and its chunks are free."""
    ledger.leaving -= c.chunks
    ledger.pool.give(c.runs)
    c.enter(State.ABSENT)
    ledger.recount(c)
    leave_room(ledger, c)
    c.evictions += 1
    c.tally.evictions += 1
    ledger.evictions += 1
    ledger.out.append(Evicted(c.name, c.generation, c.nbytes, bytes_back))
    if c.unregistering:
        registry.finish_unregister(ledger, c)
    ledger.replan = True


def write_back_failed(ledger: Ledger, c: Component) -> None:
    """It stays, with the writes of its worker."""
    ledger.leaving -= c.chunks
    c.enter(State.RESIDENT)
    leave_room(ledger, c)


def save_failed(ledger: Ledger, c: Component, why: str) -> None:
    """Scratch leaves anyway: it comes in as zeros again, and its holder is told so."""
    ledger.out.append(Lost(c.name, c.generation, why))
    forget(c)
    vacate(ledger, c, bytes_back=0)


def leave_room(ledger: Ledger, c: Component) -> None:
    """Its eviction serves no waiter any more."""
    if c.evicting_for is not None and (session := ledger.sessions.get(c.evicting_for[0])):
        session.makes_way.pop(c.generation, None)
    c.evicting_for = None
