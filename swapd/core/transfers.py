"""How a component comes in and leaves, and when it leaves on its own; `planner.py` decides which
leave to make room. A workspace has no host copy: its chunks are lent for one lease."""

from swapd.core import eviction, predictions, registry, twins
from swapd.core.actions import (
    CopyIn,
    CopyOut,
    Evict,
    Evicted,
    Hasten,
    Lend,
    Lost,
    Reason,
    Reclaim,
    SendRevoke,
    StopCopy,
    Urgency,
)
from swapd.core.chunks import count, without
from swapd.core.events import MemoryMissing
from swapd.core.ledger import OTHERS, Ledger, observe
from swapd.core.records import MISSING, Component, Key, Transfer, workspace_name
from swapd.core.states import State
from swapd.shared.protocol import Histogram, Runs

# --- in ----------------------------------------------------------------------------------


def load(ledger: Ledger, c: Component) -> None:
    c.generation = ledger.next_generation()
    c.enter(State.LOADING)
    c.load_started = ledger.now
    c.used = c.kept_no_more = False
    twin = twins.take_chunks(ledger, c)
    lane = None if c.workspace or c.joined else ledger.lane_in
    ledger.moves[c.generation] = Transfer(c, c.uid, ledger.now, lane)
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
        c.urgency = _urgency(ledger, c)
        ledger.out.append(
            CopyIn(
                c.uid,
                c.name,
                c.generation,
                c.nbytes,
                c.runs,
                c.kept,
                in_use,
                c.urgency,
                joins=twin.name if twin is not None else "",
            )
        )
        _make_stoppable(ledger, c)
        if twin is not None and twin.name in ledger.idle:
            go(ledger, twin)


def _urgency(ledger: Ledger, c: Component) -> Urgency:
    """Return the rank of the first waiter for this load, or one behind all waiters."""
    waiters = [w for key in c.promised if (w := ledger.queue.get(key)) is not None]
    if waiters:
        return (0, *min([w.order for w in waiters]))
    return (1 if c.expected else 2, 0, c.generation)


def hasten(ledger: Ledger, c: Component, urgency: Urgency) -> None:
    if urgency != c.urgency:
        c.urgency = urgency
        ledger.out.append(Hasten(c.name, c.generation, urgency))


def _make_stoppable(ledger: Ledger, c: Component) -> None:
    ledger.idle.drop(c)
    if c.stoppable:
        make_idle(ledger, c, since=ledger.now)


def copied(
    ledger: Ledger, move: Transfer, nbytes: int, times: Histogram, took_s: float = 0.0
) -> float:
    """Count a copy that has ended. Return its seconds without waits for other copies: `took_s` if
    given."""
    lane, now = move.lane, ledger.now
    assert lane is not None
    observe(times, now - move.began)
    alone_s = took_s or now - max(move.began, lane.ended_at)
    if nbytes and alone_s > 0:
        lane.bytes_per_s = nbytes / alone_s
    lane.nbytes += nbytes
    lane.ended_at = now
    lane.busy_s += alone_s
    return alone_s


def loaded(ledger: Ledger, c: Component, copy_s: float | None = None) -> None:
    """`copy_s`: seconds of the copy; None if nothing was copied."""
    c.enter(State.RESIDENT)
    c.resident_since = ledger.now
    ledger.holders.rank(c)
    if c.joined:
        return
    c.swap_in_s = ledger.now - c.load_started
    if not c.workspace:
        c.copy_s = copy_s
        ledger.count_load(c)


def load_failed(ledger: Ledger, c: Component) -> None:
    """Make it absent again, once its worker has let go of the chunks."""
    ledger.idle.drop(c)
    c.dirty = False  # the worker's writes during the load are not worth saving
    if c.mapped:
        return evict(ledger, c, "failed", None)
    twins.leave(ledger, c)
    ledger.pool.give(c.runs)
    ledger.drop_superseded(c)
    c.enter(State.ABSENT)
    ledger.recount(c)
    if c.unregistering:
        registry.finish_unregister(ledger, c)


# --- idle --------------------------------------------------------------------------------


def settle(ledger: Ledger, c: Component) -> None:
    """Make `c` idle or evict it if no request needs it. Call this after a lease, promise or load of
    it has ended."""
    if c.state not in (State.LOADING, State.RESIDENT) or c.leases or c.promised:
        return
    if c.workspace:
        close_workspace(ledger, c)
    elif c.state is State.LOADING:
        hasten(ledger, c, _urgency(ledger, c))
        _make_stoppable(ledger, c)
    elif not go(ledger, c):
        make_idle(ledger, c)


def go(ledger: Ledger, c: Component) -> bool:
    """Evict `c`, which has no holder, if it leaves on its own; return whether it does."""
    joined = twins.need_not_stay(ledger, c)
    reason = eviction.goes_now(c, down=bool(ledger.down), joined=joined)
    if reason is not None:
        evict(ledger, c, reason, None)
    return reason is not None


def make_idle(ledger: Ledger, c: Component, since: float = 0.0) -> None:
    """Note since when it is idle, `since` at the earliest, and that it may be evicted."""
    c.idle_since = max(c.last_used or 0.0, c.resident_since, since)
    if c.policy != "permanent":
        ledger.idle.add(c)
        ledger.busy_until = max(ledger.busy_until, eviction.stays_until(ledger, c, c.priority, 0.0))


def set_kept(ledger: Ledger, c: Component, kept: bool) -> None:
    policy = c.own_policy if kept else "sequential"
    if c.policy == policy:
        return
    registry.change_staying(ledger, c, -1)
    c.policy = policy
    registry.change_staying(ledger, c, 1)
    ledger.room_shrank |= c.policy == "permanent"
    ledger.recount(c)
    ledger.holders.rank(c)
    ledger.replan = True
    if c.state is State.LOADING:
        _make_stoppable(ledger, c)
    is_idle = c.state is State.RESIDENT and not (c.leases or c.promised)
    c.kept_no_more = is_idle and not kept
    if is_idle and not go(ledger, c):
        ledger.idle.drop(c)
        make_idle(ledger, c)


def set_pinned(ledger: Ledger, c: Component, pinned: bool) -> None:
    """In a family, this applies to the parts that it keeps."""
    if c.pinned == pinned:
        return
    kept = c.policy == c.own_policy
    if c.unpinned_policy is None:
        c.unpinned_policy, c.own_policy = c.own_policy, "permanent"
    else:
        c.own_policy, c.unpinned_policy = c.unpinned_policy, None
    set_kept(ledger, c, kept)


# --- out ---------------------------------------------------------------------------------


def evict(ledger: Ledger, c: Component, reason: Reason, key: Key | None) -> None:
    """Have `c` leave once its worker has let go of it or its load has been stopped."""
    if ledger.predicted:
        predictions.note_evicted(ledger, c)
    ledger.idle.drop(c)
    ledger.unwant(c.name)
    ledger.drop_superseded(c)
    c.reason, c.evicting_for = reason, key
    if key is not None:
        ledger.sessions[key[0]].makes_way[c.generation] = c
    twins.begin_to_leave(ledger, c)
    ledger.replan = True
    ledger.out.append(Evict(c.name, c.generation, reason, key))
    if c.stoppable:
        c.enter(State.STOPPING)
        ledger.out.append(StopCopy(c.name, c.generation))
        return
    c.enter(State.REVOKING)
    ack = c.mapped and (ledger.rules.strict or c.mutable)
    if c.mapped:
        ledger.out.append(SendRevoke(c.session, c.name, c.generation, ack))
    if ack:
        ledger.acks[c.generation] = (ledger.now, c)
    else:
        take_out(ledger, c)


def take_out(ledger: Ledger, c: Component) -> None:
    """Save the bytes of `c`, or drop it. Its worker can write to it no longer."""
    c.mapped = False
    if c.unsaved:
        c.enter(State.WRITING_BACK)
        ledger.moves[c.generation] = Transfer(c, c.uid, ledger.now, ledger.lane_out)
        ledger.out.append(CopyOut(c.uid, c.name, c.generation, c.nbytes, c.runs, c.to_save))
    else:
        _leave_unsaved(ledger, c)


def _leave_unsaved(ledger: Ledger, c: Component) -> None:
    """Unsaved scratch begins anew as zeros. For all else, the host copy has all bytes."""
    if c.dirty and c.scratch:
        c.kept, c.dirty = (), False
    vacate(ledger, c)


def saved(ledger: Ledger, c: Component) -> None:
    bytes_back, c.dirty = c.bytes_back, False
    if c.scratch:
        c.kept = c.to_save
    vacate(ledger, c, bytes_back)


def save_failed(ledger: Ledger, c: Component, why: str) -> None:
    ledger.out.append(Lost(c.name, c.generation, why))
    _leave_unsaved(ledger, c)


def vacate(ledger: Ledger, c: Component, bytes_back: int = 0) -> None:
    twins.leave(ledger, c)
    ledger.pool.give(c.runs)
    c.enter(State.ABSENT)
    ledger.recount(c)
    makes_way_no_more(ledger, c)
    c.made_way_at = ledger.now if c.reason in ("room", "alternating") else None
    if c.reason != "joined":  # its bytes stay in
        ledger.count_eviction(c)
    ledger.out.append(Evicted(c.name, c.generation, c.nbytes, bytes_back))
    if c.unregistering:
        registry.finish_unregister(ledger, c)
    ledger.replan = True


def write_back_failed(ledger: Ledger, c: Component) -> None:
    ledger.leaving -= c.frees
    c.frees = 0
    c.enter(State.RESIDENT)
    makes_way_no_more(ledger, c)


def makes_way_no_more(ledger: Ledger, c: Component) -> None:
    if c.evicting_for is not None and (session := ledger.sessions.get(c.evicting_for[0])):
        session.makes_way.pop(c.generation, None)
    c.evicting_for = None


# --- workspaces --------------------------------------------------------------------------


def open_workspace(ledger: Ledger, key: Key, nbytes: int, chunks: int) -> str:
    session, name = key[0], workspace_name(*key)
    c = Component(0, name, session, nbytes, chunks, "sequential", None, False, workspace=True)
    c.tally = ledger.counts.of[OTHERS]
    c.state = State.ABSENT
    ledger.components[name] = c
    ledger.sessions[session].owns[name] = None
    return name


def close_workspace(ledger: Ledger, c: Component) -> None:
    """Remove a workspace that no request needs, after a reclaim if it is lent."""
    if c.state is State.ABSENT:
        registry.remove(ledger, c)
    elif c.state in (State.LOADING, State.RESIDENT):
        is_lent = c.state is State.RESIDENT
        c.enter(State.RECLAIMING)
        ledger.leaving += c.chunks
        ledger.reclaiming += c.chunks
        ledger.unwant(c.name)
        if is_lent:
            reclaim(ledger, c)


def reclaim(ledger: Ledger, c: Component) -> None:
    """Call this once the memory has been lent, not while that is under way."""
    ledger.moves[c.generation] = Transfer(c, c.uid, ledger.now)
    ledger.out.append(Reclaim(c.name, c.generation, c.runs))


def missing_at_start(ledger: Ledger, event: MemoryMissing) -> None:
    """Take chunks from their users as those of a lent workspace that no request needs."""
    chunks = count(event.runs)
    nbytes = chunks * ledger.chunk_bytes
    c = Component(0, MISSING, 0, nbytes, chunks, "sequential", None, False, workspace=True)
    c.state, c.generation = State.RESIDENT, ledger.next_generation()
    c.runs = ledger.pool.take(chunks, prefer=event.runs)
    close_workspace(ledger, c)


def reclaimed_in_part(ledger: Ledger, c: Component, runs: Runs) -> None:
    """The other chunks of the workspace are still out."""
    ledger.pool.give(runs)
    c.runs = without(c.runs, runs)
    chunks = count(runs)
    c.chunks -= chunks
    c.nbytes = c.chunks * ledger.chunk_bytes
    ledger.leaving -= chunks
    ledger.reclaiming -= chunks
    ledger.replan = True


def reclaimed(ledger: Ledger, c: Component) -> None:
    """All chunks of the workspace are the arena's again, or were never given away."""
    ledger.pool.give(c.runs)
    if c.state is State.RECLAIMING:
        ledger.leaving -= c.chunks
        ledger.reclaiming -= c.chunks
    c.enter(State.ABSENT)
    ledger.replan = True
    if ledger.is_current(c) and not c.promised:
        registry.remove(ledger, c)
