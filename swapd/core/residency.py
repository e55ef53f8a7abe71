"""The residency of every component on one device: the state machine of swapd.

Lives here: what is where, who holds it, who waits, and every decision about it. May not
live here: clocks, logging, sockets, memory, torch. `handle(event)` applies one event and
returns what must now be done, in order; `README.md` beside this file has states, events,
actions and rules. To see how eviction is decided, read `_make_room` and `policy.py`.

A decision is recorded in the state at the moment it is made: a component promised to a
waiter is LOADING and held for it before the copy starts, and a victim is no longer
RESIDENT when its eviction is ordered. Free chunks are those of the ledger (`ChunkPool`),
never asked of the device.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import msgspec

from swapd.core import explain, policy
from swapd.core.actions import (
    Accept,
    AnyAction,
    CopyIn,
    CopyOut,
    DropMaster,
    Evict,
    Evicted,
    Fence,
    Grant,
    Lost,
    MakeMaster,
    Reason,
    Refuse,
    Revoke,
    SealMaster,
    Waiting,
    Want,
)
from swapd.core.chunks import ChunkPool, count
from swapd.core.deadlock import deadlocked
from swapd.core.events import (
    Acquire,
    AnyEvent,
    Cancel,
    Commit,
    CopiedIn,
    CopiedOut,
    CopyFailed,
    MasterFailed,
    MasterMade,
    MasterSealed,
    Prefetch,
    ProcessExited,
    Register,
    Release,
    Revoked,
    SessionGone,
    SessionOpened,
    Stopping,
    Tick,
    Unregister,
)
from swapd.core.queue import WaitQueue
from swapd.core.records import Agent, Component, Key, Lease, Session, State, Waiter
from swapd.protocol import Code, Placement, Runs


class Rules(msgspec.Struct, frozen=True):
    """What the user may set about decisions. Times in seconds."""

    strict: bool = False  # wait for the worker's acknowledgement before chunks are reused
    ack_timeout_s: float = 2.0
    residency_factor: float = 8.0  # minimum residency, in multiples of the swap-in time
    residency_bound_s: float = 2.0  # and its upper bound, so that nobody starves
    patience_s: float = 30.0  # who waited longer goes first, whatever its priority


class Move(msgspec.Struct, frozen=True):
    """A copy in flight. `component` may be gone by the time it ends; the chunks are not."""

    component: Component
    runs: Runs


class Residency:
    """What is on one device of `chunks` chunks, and everything decided about it.

    Synchronous and single-threaded: one caller, one event at a time, in order of time.
    """

    def __init__(self, chunks: int, chunk_bytes: int, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        self.chunk_bytes = chunk_bytes
        self.pool = ChunkPool(chunks)
        self.sessions: dict[int, Session] = {}
        #: By name; the name is free again as soon as the component is gone.
        self.components: dict[str, Component] = {}
        self.leases: dict[Key, Lease] = {}
        self.queue = WaitQueue(self.rules.patience_s)
        self.stopping = False
        #: Resident, leased by nobody, promised to nobody, not `resident`: what may be
        #: evicted, least recently used first.
        self.idle: dict[str, Component] = {}
        #: Those that somebody leases.
        self.leased: dict[str, Component] = {}
        #: Copies in flight, by generation.
        self.moves: dict[int, Move] = {}
        #: Chunks that a process which may still be alive can write to, by session.
        self.quarantined: dict[int, list[Runs]] = {}
        #: Totals since the start, for status.
        self.loads = self.evictions = self.hits = self.bytes_in = self.bytes_out = 0
        self.peak_chunks = 0

        self._now = 0.0
        self._out: list[AnyAction] = []
        self._uid = self._generation = self._seq = 0
        #: Components that have a master, by uid; kept until DropMaster is ordered.
        self._masters: dict[int, Component] = {}
        #: Waiters for a name that is not registered, or not committed.
        self._parked: dict[Key, Waiter] = {}
        #: Names to bring in when nobody waits for memory.
        self._prefetch: dict[str, None] = {}
        #: Queued waiters whose agent held a lease when they were queued.
        self._holding: dict[Key, Waiter] = {}
        #: How many leases each agent holds.
        self._held: dict[Agent, int] = {}
        #: Acknowledgements waited for, by generation, in order of their deadline.
        self._acks: dict[int, tuple[float, Component]] = {}
        #: Alternating components by group.
        self._groups: dict[str, dict[str, Component]] = {}
        #: Chunks of components being evicted: theirs soon to be free.
        self._leaving = 0
        #: Components kept for who waits, and the holders that were told so.
        self._wanted: dict[str, set[int]] = {}
        self._replan = False
        self._planned_at = 0.0
        self._plan_again_at: float | None = None
        #: A `resident` component came in: what fitted beside it before may not fit any more.
        self._room_shrank = False

    def __repr__(self) -> str:
        used = (self.pool.total - self.pool.free) * self.chunk_bytes
        total = self.pool.total * self.chunk_bytes
        loading = [c.name for c in self.components.values() if c.state is State.LOADING]
        return (
            f"<Residency {explain.size(used)}/{explain.size(total)}, {len(self.leases)} leases, "
            f"{len(self.queue)} waiting, loading {', '.join(loading) or 'nothing'}>"
        )

    # --- events in, actions out ----------------------------------------------------------

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Apply one event; return what must now be done, in order."""
        self._now = event.now
        self._on[type(event)](self, event)
        while self._replan:
            self._plan()
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest, on the events' clock; None if none is."""
        times = [self._plan_again_at, self.queue.next_deadline(self._planned_at)]
        if self._acks:
            times.append(next(iter(self._acks.values()))[0])
        return min((t for t in times if t is not None), default=None)

    @property
    def quiet(self) -> bool:
        """Whether no lease is held and no copy is in flight."""
        return not self.leases and not self.moves

    def _on_session_opened(self, event: SessionOpened) -> None:
        self.sessions[event.session] = Session(event.label)

    def _on_register(self, event: Register) -> None:
        chunks = -(-event.nbytes // self.chunk_bytes)
        if problem := self._unregisterable(event, chunks):
            return self._refuse((event.session, event.request), *problem)
        self._uid += 1
        c = Component(
            self._uid,
            event.name,
            event.session,
            event.nbytes,
            chunks,
            event.policy,
            event.group,
            event.mutable,
        )
        self.components[c.name] = c
        self.sessions[c.session].owns[c.name] = None
        self._masters[c.uid] = c
        c.answer = event.request
        self._out.append(MakeMaster(c.session, c.uid, c.name, c.nbytes, c.mutable))

    def _unregisterable(self, event: Register, chunks: int) -> tuple[Code, str] | None:
        """Why a component may not be registered, or None if it may."""
        if event.session not in self.sessions:
            return "bad_request", explain.REPLAYED
        if event.nbytes < 0:
            return "bad_request", explain.SIZE
        if self.stopping:
            return "stopping", explain.STOPPING
        if other := self.components.get(event.name):
            return "duplicate_name", explain.duplicate(self, other)
        if (event.policy == "alternating") != (event.group is not None):
            return "bad_request", explain.GROUP
        fixed = sum(c.chunks for c in self.components.values() if c.policy == "resident")
        if event.policy != "resident":
            fixed = 0
        if chunks + fixed > self.pool.total:
            return "too_large", explain.too_large(self, event.name, chunks, fixed)
        return None

    def _on_master_made(self, event: MasterMade) -> None:
        c = self._masters[event.uid]
        if self._is_current(c):
            self._accept(c)
        else:
            self._drop_master(c)

    def _on_commit(self, event: Commit) -> None:
        key = (event.session, event.request)
        c = self.components.get(event.name)
        if c is None or c.session != event.session:
            return self._refuse(key, "unknown_component", explain.unknown(self, event.name))
        if c.state is not State.FILLING or c.answer is not None:
            return self._refuse(key, "bad_request", explain.committed(event.name))
        c.answer = event.request
        self._out.append(SealMaster(c.uid, c.name))

    def _on_master_sealed(self, event: MasterSealed) -> None:
        c = self._masters[event.uid]
        if not self._is_current(c):
            return self._drop_master(c)
        self._accept(c)
        c.state = State.ABSENT
        if c.group is not None:
            self._groups.setdefault(c.group, {})[c.name] = c
        self._unpark(c.name)

    def _on_master_failed(self, event: MasterFailed) -> None:
        c = self._masters[event.uid]
        if self._is_current(c):
            assert c.answer is not None
            self._refuse((c.session, c.answer), event.code, event.why)
            self._remove(c)
        self._drop_master(c)

    def _on_unregister(self, event: Unregister) -> None:
        key = (event.session, event.request)
        c = self.components.get(event.name)
        if c is None:
            return self._refuse(key, "unknown_component", explain.unknown(self, event.name))
        if c.session != event.session:
            return self._refuse(key, "not_owner", explain.not_owner(self, c))
        if c.leases or c.answer is not None:
            return self._refuse(key, "in_use", explain.in_use(self, c))
        c.answer = event.request
        c.unregistering = True
        self._refuse_waiters(c, explain.unregistered(c))
        if not self._is_current(c):
            return  # the last promise on it fell, and with it the component
        if c.state is State.RESIDENT:
            self._evict(c, "unregister", None)
        elif c.state in (State.ABSENT, State.FILLING):
            self._finish_unregister(c)

    def _on_acquire(self, event: Acquire) -> None:
        w = self._waiter(event)
        session = self.sessions.get(event.session)
        if session is None or event.request in session.waiters or event.request in session.leases:
            return self._refuse(w.key, "bad_request", explain.REPLAYED)
        if self.stopping:
            return self._refuse(w.key, "stopping", explain.STOPPING)
        missing = [n for n in w.names if not self.may_be_acquired(n)]
        if missing and not w.wait:
            return self._refuse(w.key, "unknown_component", explain.unknown(self, missing[0]))
        self.queue.add(w)
        session.waiters.add(w.request)
        if missing:
            self._parked[w.key] = w
            self._tell_waiting(w, explain.parked(missing))
        else:
            self._enter(w)

    def _on_release(self, event: Release) -> None:
        lease = self.leases.pop((event.session, event.lease), None)
        if lease is None:
            return  # released before, or its session is gone: nothing to do
        self.sessions[event.session].leases.discard(event.lease)
        self._forget_holder(lease)
        self._replan |= self._somebody_waits
        key = (event.session, event.lease)
        for name in lease.names:
            c = self.components[name]
            c.leases.discard(key)
            if not c.leases:
                del self.leased[name]
                c.released_at = c.last_used = self._now
                self._settle(c)

    def _on_cancel(self, event: Cancel) -> None:
        key = (event.session, event.acquire)
        if w := self.queue.get(key):
            self._forget(w)
        else:
            self._on_release(Release(event.now, event.session, event.acquire))

    def _on_prefetch(self, event: Prefetch) -> None:
        key = (event.session, event.request)
        if self.stopping:
            return self._refuse(key, "stopping", explain.STOPPING)
        for name in event.names:
            if not self.may_be_acquired(name):
                return self._refuse(key, "unknown_component", explain.unknown(self, name))
        self._prefetch.update(dict.fromkeys(event.names))
        self._out.append(Accept(*key))
        self._replan = True

    def _on_revoked(self, event: Revoked) -> None:
        pending = self._acks.get(event.generation)
        if pending is None or pending[1].session != event.session:
            return  # stale, or a lie: it changes nothing
        del self._acks[event.generation]
        self._take_out(pending[1])

    def _on_copied_in(self, event: CopiedIn) -> None:
        move = self.moves.pop(event.generation)
        c = move.component
        self.bytes_in += c.nbytes
        if not self._is_current(c):
            return self._abandon(move)
        c.state = State.RESIDENT
        c.resident_since = self._now
        c.swap_in_s = self._now - c.load_started
        c.loads += 1
        self.loads += 1
        for key in list(c.promised):
            w = self.queue.get(key)
            assert w is not None
            w.pending.discard(c.name)
            if not w.pending:
                self._grant(w)
        self._settle(c)
        self._share_with_queued(c)
        self._replan = True

    def _on_copied_out(self, event: CopiedOut) -> None:
        move = self.moves.pop(event.generation)
        c = move.component
        self.bytes_out += c.nbytes
        if not self._is_current(c):
            return self._abandon(move)
        c.dirty = False
        self._vacate(c, bytes_back=c.nbytes)

    def _on_copy_failed(self, event: CopyFailed) -> None:
        """A load that failed leaves the component absent, a write-back leaves it resident.

        Nothing is lost either way; who waited for the copy is refused.
        """
        move = self.moves.pop(event.generation)
        c = move.component
        if not self._is_current(c):
            return self._abandon(move)
        why = explain.copy_failed(c, event.why)
        if c.state is State.LOADING:
            self.pool.give(c.runs)
            c.state = State.ABSENT
            for key in list(c.promised):
                self._refuse_waiter(key, "device_failed", why)
            if c.unregistering:
                self._finish_unregister(c)
        else:
            self._leaving -= c.chunks
            c.state = State.RESIDENT
            if c.evicting_for is not None:
                self._refuse_waiter(c.evicting_for, "device_failed", why)
            else:
                self._prefetch.clear()  # it may have been for one: do not try forever
            c.evicting_for = None
            if c.unregistering:
                assert c.answer is not None
                self._refuse((c.session, c.answer), "device_failed", why)
                c.answer, c.unregistering = None, False
            self._make_idle(c)
            self._share_with_queued(c)
        self._replan = True

    def _on_tick(self, event: Tick) -> None:
        for w in self.queue.expired(event.now):
            self._refuse_waiter(w.key, "timeout", explain.timeout(self, w, event.now))
        for deadline, c in list(self._acks.values()):
            if deadline > event.now:
                break
            del self._acks[c.generation]
            session = self.sessions[c.session]
            if not session.fenced:
                session.fenced = True
                self._out.append(Fence(c.session, explain.fenced(c, self.rules.ack_timeout_s)))
        self._replan = True

    def _on_stopping(self, event: Stopping) -> None:
        self.stopping = True
        self._prefetch.clear()
        for w in list(self.queue):
            self._refuse_waiter(w.key, "stopping", explain.STOPPING)

    def _on_session_gone(self, event: SessionGone) -> None:
        session = self.sessions.pop(event.session, None)
        if session is None:
            return
        for told in self._wanted.values():
            told.discard(event.session)
        owned = [self.components[name] for name in session.owns]
        for c in owned:
            self._strand(c, event.alive)
        for request in list(session.waiters):
            if w := self.queue.get((event.session, request)):
                self._forget(w)
        for request in list(session.leases):
            self._drop_lease((event.session, request))
        for c in self.components.values():
            if c.evicting_for is not None and c.evicting_for[0] == event.session:
                c.evicting_for = None
        for c in owned:
            self._refuse_waiters(c, explain.owner_gone(c, session.label))
        self._replan = True

    def _on_process_exited(self, event: ProcessExited) -> None:
        for runs in self.quarantined.pop(event.session, ()):
            self.pool.give(runs)
        self._replan = True

    _on: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Acquire: _on_acquire,
        Release: _on_release,
        CopiedIn: _on_copied_in,
        CopiedOut: _on_copied_out,
        CopyFailed: _on_copy_failed,
        Revoked: _on_revoked,
        Tick: _on_tick,
        Cancel: _on_cancel,
        Prefetch: _on_prefetch,
        Register: _on_register,
        MasterMade: _on_master_made,
        Commit: _on_commit,
        MasterSealed: _on_master_sealed,
        MasterFailed: _on_master_failed,
        Unregister: _on_unregister,
        SessionOpened: _on_session_opened,
        SessionGone: _on_session_gone,
        ProcessExited: _on_process_exited,
        Stopping: _on_stopping,
    }

    # --- the plan ------------------------------------------------------------------------

    def _plan(self) -> None:
        """Decide all that can be decided now. Run again after every event that matters, and
        after itself until it changes nothing.

        1. Whoever's turn it is gets room, if there is or can be any, and is admitted.
        2. If it must wait, one that holds a lease already may overtake it: only when that
           one has run will its memory come free.
        3. Prefetches get what nobody waits for.
        4. Holders are told that their memory is wanted, or no longer.
        """
        self._replan = False
        self._planned_at = self._now
        self._plan_again_at = None
        wanted: set[str] = set()
        while (head := self.queue.head(self._now)) is not None:  # 1
            if not self._make_room(head, wanted):
                break
            self._admit(head)
        for w in list(self._holding.values()):  # 2
            if w.queued and w.owner in self._held and self._make_room(w, wanted):
                self._admit(w)
                self._replan = True
        if self._room_shrank:
            self._refuse_what_no_longer_fits()
        if self._replan:
            return  # something changed: decide again before anybody is told
        if not self.queue.queued:  # 3
            for name in list(self._prefetch):
                if not self._try_prefetch(self.components[name]) and self._leaving:
                    break  # the room that is coming is meant for this one
        self._tell_wanted(wanted)  # 4

    def _make_room(self, w: Waiter | None, wanted: set[str], only: Component | None = None) -> bool:
        """Evict what `w` needs evicted; return whether its chunks are free now.

        Evicts nothing unless all that is needed can go: 1. what it asks for has finished
        leaving; 2. its rivals (other members of an alternating group) are idle or leaving;
        3. the free chunks, those about to be free, its rivals' and the victims that
        `policy.victims` picks are enough together. Otherwise adds to `wanted` who should
        give way. `only` stands for the component of a prefetch, which has no waiter.
        """
        asked = [self.components[n] for n in w.names] if w else [only] if only else []
        if any(c.evicting for c in asked):  # 1
            return False
        rivals = self._rivals(asked)
        missing = sum(c.chunks for c in asked if c.state is State.ABSENT)
        if missing <= self.pool.free and not rivals:
            return True
        leaving = [r for r in rivals if r.evicting]
        idle_rivals = [r for r in rivals if r.name in self.idle and self._may_evict(r)]
        spare = {c.name for c in asked} | {r.name for r in rivals}
        short = missing - self.pool.free - self._leaving  # 3
        short -= sum(r.chunks for r in idle_rivals)
        chosen = policy.victims(
            short,
            (
                (c.name, c.chunks)
                for c in self.idle.values()
                if c.name not in spare and self._may_evict(c)
            ),
        )
        if chosen is None or len(idle_rivals) + len(leaving) < len(rivals):  # 2
            if w is not None:
                self._find_who_gives_way(w, missing, rivals, spare, wanted)
            return False
        key = w.key if w else None
        for r in idle_rivals:
            self._evict(r, "alternating", key)
        for name in chosen:
            self._evict(self.components[name], "room", key)
        return not any(r.evicting for r in rivals) and missing <= self.pool.free

    @property
    def _somebody_waits(self) -> bool:
        """For memory: a waiter, or a prefetch."""
        return bool(self.queue.queued or self._prefetch)

    def _rivals(self, asked: list[Component]) -> list[Component]:
        """The other members of its alternating groups that are on the device."""
        rivals: list[Component] = []
        for c in asked:
            if c.group is not None:
                mates = self._groups[c.group].values()
                rivals += [m for m in mates if m is not c and m.on_device]
        return rivals

    def _may_evict(self, c: Component) -> bool:
        """The minimum-residency rule; notes when to look again if it says no."""
        until = policy.protected_until(
            resident_since=c.resident_since,
            idle_since=c.idle_since,
            swap_in_s=c.swap_in_s or 0.0,
            gap_s=c.gap_s,
            factor=self.rules.residency_factor,
            bound_s=self.rules.residency_bound_s,
        )
        if until <= self._now:
            return True
        self._look_again(until)
        return False

    def _find_who_gives_way(
        self,
        w: Waiter,
        missing: int,
        rivals: list[Component],
        spare: AbstractSet[str],
        wanted: set[str],
    ) -> None:
        """Add to `wanted` the components that must go to let `w` in: rivals, idle ones first,
        then leased ones.

        An idle one that is wanted is kept for `w`: were it lent again while `w` waits for the
        release of another, two that take turns could keep `w` out forever.
        """
        short = missing - self.pool.free - self._leaving
        short -= sum(r.chunks for r in rivals if not r.evicting)
        idle = [c for c in self.idle.values() if c.name not in spare]
        holds = w.owner in self._held
        leased = [
            c
            for c in self.leased.values()
            if c.policy != "resident"
            and c.name not in spare
            and not (holds and self._only_holder(c, w.owner))
        ]
        leased.sort(key=lambda c: c.resident_since)
        names = policy.victims(short, ((c.name, c.chunks) for c in idle + leased))
        for c in idle + leased:
            if c.name in names if names is not None else c.chunks:
                self._want_after_quantum(c, wanted)
        for r in rivals:
            if r.leases or r.name in self.idle:
                self._want_after_quantum(r, wanted)
        self._tell_waiting(w, "")

    def _only_holder(self, c: Component, agent: Agent) -> bool:
        return all(self.leases[k].owner == agent for k in c.leases)

    def _want_after_quantum(self, c: Component, wanted: set[str]) -> None:
        rules = self.rules
        quantum = policy.quantum_s(
            c.swap_in_s or 0.0, rules.residency_factor, rules.residency_bound_s
        )
        over = c.resident_since + quantum
        if over <= self._now:
            wanted.add(c.name)
        else:
            self._look_again(over)

    def _look_again(self, at: float) -> None:
        if self._plan_again_at is None or at < self._plan_again_at:
            self._plan_again_at = at

    def _tell_wanted(self, wanted: set[str]) -> None:
        """Tell holders what changed since they were last told."""
        for name in [n for n in self._wanted if n not in wanted]:
            self._unwant(name)
            self._share_with_queued(self.components[name])
        for name in sorted(wanted):
            told = self._wanted.setdefault(name, set())
            for session in sorted({s for s, _ in self.components[name].leases} - told):
                self._out.append(Want(session, name, True))
                told.add(session)

    def _unwant(self, name: str) -> None:
        for session in sorted(self._wanted.pop(name, ())):
            self._out.append(Want(session, name, False))

    def _try_prefetch(self, c: Component) -> bool:
        """Bring `c` in if there is room or can be; whether the prefetch is settled."""
        if c.unregistering or (c.on_device and not c.evicting):
            del self._prefetch[c.name]
            return True
        if not self._make_room(None, set(), only=c):
            return False
        del self._prefetch[c.name]
        self._load(c)
        return True

    # --- waiters -------------------------------------------------------------------------

    def _waiter(self, event: Acquire) -> Waiter:
        self._seq += 1
        return Waiter(
            session=event.session,
            request=event.request,
            agent=event.agent,
            names=tuple(dict.fromkeys(event.names)),
            priority=event.priority,
            deadline=event.deadline,
            wait=event.wait,
            arrived=event.now,
            seq=self._seq,
        )

    def may_be_acquired(self, name: str) -> bool:
        """Whether it is registered, committed, and not going away."""
        c = self.components.get(name)
        return c is not None and c.state is not State.FILLING and not c.unregistering

    def _enter(self, w: Waiter) -> None:
        """All names are there: grant at once, share a load, queue, or refuse for good."""
        asked = [self.components[n] for n in w.names]
        for c in asked:
            if c.released_at is not None:
                c.gap_s = self._now - c.released_at
                c.released_at = None
                self._replan |= self._somebody_waits  # it may be protected no longer
        if self._may_share(w, asked):
            self._replan |= self._somebody_waits  # and may have counted on one of them
            return self._admit(w)
        if problem := self._never_fits(asked):
            return self._refuse_waiter(w.key, *problem)
        self.queue.push(w)
        for c in asked:
            c.waiting[w.key] = None
        if w.owner in self._held:
            self._holding[w.key] = w
            self._refuse_deadlocked()
        if w.key in self._holding or self.queue.head(self._now) is w:
            self._replan = True
        elif w.queued:
            self._tell_waiting(w, "")

    def _may_share(self, w: Waiter, asked: list[Component]) -> bool:
        """Whether `w` needs no memory, and delays nobody who was promised some.

        A component that is wanted for somebody else takes no new holders, or overlapping
        leases would keep it forever; a session that holds it already may take it again,
        since it could not release otherwise.
        """
        for c in asked:
            if c.state not in (State.RESIDENT, State.LOADING) or c.unregistering:
                return False
            if c.name in self._wanted and all(s != w.session for s, _ in c.leases):
                return False
        return True

    def _never_fits(self, asked: list[Component]) -> tuple[Code, str] | None:
        groups = [c.group for c in asked if c.group is not None]
        if len(set(groups)) < len(groups):
            return "conflict", explain.conflict(asked)
        chunks = sum(c.chunks for c in asked)
        fixed = self._fixed_chunks({c.name for c in asked})
        if chunks + fixed > self.pool.total:
            names = " + ".join(c.name for c in asked)
            return "too_large", explain.too_large(self, names, chunks, fixed)
        return None

    def _fixed_chunks(self, but: AbstractSet[str]) -> int:
        """Chunks that will not come free: `resident` components that are in, quarantine."""
        lost = sum(count(runs) for held in self.quarantined.values() for runs in held)
        return lost + sum(
            c.chunks
            for c in self.components.values()
            if c.policy == "resident" and c.on_device and not c.unregistering and c.name not in but
        )

    def _refuse_what_no_longer_fits(self) -> None:
        self._room_shrank = False
        for w in list(self.queue.queued):
            if problem := self._never_fits([self.components[n] for n in w.names]):
                self._refuse_waiter(w.key, *problem)
        self._refuse_deadlocked()

    def _refuse_deadlocked(self) -> None:
        """Refuse, newest first, until those that hold and wait can all finish."""
        while stuck := self._deadlocked():
            newest = max(stuck, key=lambda w: w.seq)
            message = explain.deadlock(self, newest, stuck)
            self._refuse_waiter(newest.key, "deadlock", message)

    def _deadlocked(self) -> list[Waiter]:
        waiters = [w for w in self._holding.values() if w.queued and w.owner in self._held]
        wants: dict[Agent, set[str]] = {}
        for w in waiters:
            wants.setdefault(w.owner, set()).update(w.names)
        holds: dict[Agent, set[str]] = {a: set() for a in wants}
        for lease in self.leases.values():
            if lease.owner in holds:
                holds[lease.owner].update(n for n in lease.names if n in self.components)
        stuck = deadlocked(wants, holds, self._fit_together)
        return [w for w in waiters if w.owner in stuck]

    def _fit_together(self, names: AbstractSet[str]) -> bool:
        return self._never_fits([self.components[n] for n in names]) is None

    def _share_with_queued(self, c: Component) -> None:
        """`c` came in, or is wanted no more: waiters that need no memory wait no longer."""
        for key in list(c.waiting):
            w = self.queue.get(key)
            if w is not None and self._may_share(w, [self.components[n] for n in w.names]):
                self._admit(w)
                self._replan = True

    def _admit(self, w: Waiter) -> None:
        """Promise `w` all it asked for, and start what copies that takes."""
        self._leave_queue(w)
        w.admitted = True
        for name in w.names:
            c = self.components[name]
            c.promised[w.key] = None
            self.idle.pop(name, None)
            if c.state is State.ABSENT:
                self._load(c)
            if c.state is State.LOADING:
                w.pending.add(name)
                w.loaded = True
            else:
                c.hits += 1
                self.hits += 1
        if not w.pending:
            self._grant(w)

    def _grant(self, w: Waiter) -> None:
        self.queue.forget(w)
        session = self.sessions[w.session]
        session.waiters.discard(w.request)
        session.leases.add(w.request)
        self.leases[w.key] = Lease(w.session, w.agent, w.names)
        self._held[w.owner] = self._held.get(w.owner, 0) + 1
        placements = []
        for name in w.names:
            c = self.components[name]
            c.promised.pop(w.key, None)
            c.leases.add(w.key)
            self.leased[name] = c
            c.used = True
            if c.session == w.session:
                c.mapped = True
                c.dirty = c.mutable
                placements.append(Placement(name, c.generation, c.runs))
        waited_s = self._now - w.arrived
        self._out.append(Grant(*w.key, tuple(placements), waited_s, w.loaded))

    def _leave_queue(self, w: Waiter) -> None:
        self.queue.unqueue(w)
        self._holding.pop(w.key, None)
        self._parked.pop(w.key, None)
        for name in w.names:
            if c := self.components.get(name):
                c.waiting.pop(w.key, None)

    def _forget(self, w: Waiter) -> None:
        """Leave nothing of a waiter; what was promised to it is idle again."""
        self._leave_queue(w)
        self.queue.forget(w)
        if session := self.sessions.get(w.session):
            session.waiters.discard(w.request)
        for name in w.names:
            c = self.components.get(name)
            if c is not None and w.key in c.promised:
                c.promised.pop(w.key, None)
                self._settle(c)
        self._drop_done_with(w)
        self._replan = True

    def _drop_done_with(self, w: Waiter) -> None:
        """`w` left the queue: a sequential component that stayed only for it goes."""
        for name in w.names:
            c = self.idle.get(name)
            if c is not None and self._is_done_with(c):
                self._evict(c, "sequential", None)

    def _refuse_waiter(self, key: Key, code: Code, message: str) -> None:
        if w := self.queue.get(key):
            self._forget(w)
            self._refuse(key, code, message)

    def _refuse_waiters(self, c: Component, why: str) -> None:
        """`c` goes away: refuse who waits for it, or park who said it would wait."""
        for w in [w for w in self.queue if c.name in w.names and w.key not in self._parked]:
            if w.wait and not w.admitted:
                self._leave_queue(w)
                self._drop_done_with(w)
                self._parked[w.key] = w
                self._replan = True
            else:
                self._refuse_waiter(w.key, "component_gone", why)

    def _unpark(self, name: str) -> None:
        for w in list(self._parked.values()):
            if name in w.names and all(self.may_be_acquired(n) for n in w.names):
                del self._parked[w.key]
                self._enter(w)

    def _tell_waiting(self, w: Waiter, why: str) -> None:
        if not w.told:
            w.told = True
            why = why or explain.blocked(self, w, most=3)
            self._out.append(Waiting(w.session, w.request, w.names, why))

    def _refuse(self, key: Key, code: Code, message: str) -> None:
        self._out.append(Refuse(*key, code, message))

    # --- leases --------------------------------------------------------------------------

    def _forget_holder(self, lease: Lease) -> None:
        self._held[lease.owner] -= 1
        if not self._held[lease.owner]:
            del self._held[lease.owner]

    def _drop_lease(self, key: Key) -> None:
        """A session that is gone gives back what it held."""
        lease = self.leases.pop(key)
        self._forget_holder(lease)
        for name in lease.names:
            c = self.components[name]
            c.leases.discard(key)
            if not c.leases:
                del self.leased[name]
                c.last_used = self._now
                self._settle(c)

    # --- components coming, going, and gone ----------------------------------------------

    def _load(self, c: Component) -> None:
        self._generation += 1
        c.generation = self._generation
        c.state = State.LOADING
        c.load_started = self._now
        c.used = False
        c.runs = self.pool.take(c.chunks, prefer=c.runs)
        self.peak_chunks = max(self.peak_chunks, self.pool.total - self.pool.free)
        self.moves[c.generation] = Move(c, c.runs)
        self._prefetch.pop(c.name, None)
        if c.policy == "resident":
            self._room_shrank = self._replan = True
        self._out.append(CopyIn(c.uid, c.name, c.generation, c.nbytes, c.runs))

    def _settle(self, c: Component) -> None:
        """After a lease or a promise ended, or a load: idle if nobody needs it now."""
        if c.state is not State.RESIDENT or c.leases or c.promised:
            return
        if c.unregistering:
            self._evict(c, "unregister", None)
        elif self._is_done_with(c):
            self._evict(c, "sequential", None)
        else:
            self._make_idle(c)
        self._replan = True

    def _is_done_with(self, c: Component) -> bool:
        """Whether a component with no lease and no promise is to be dropped at once."""
        return c.policy == "sequential" and c.used and not c.waiting

    def _make_idle(self, c: Component) -> None:
        c.idle_since = self._now
        if c.policy != "resident":
            self.idle[c.name] = c

    def _evict(self, c: Component, reason: Reason, key: Key | None) -> None:
        """Decided: `c` leaves. It does so at once, or when its worker has let go of it."""
        self.idle.pop(c.name, None)
        self._unwant(c.name)
        c.reason, c.evicting_for = reason, key
        self._leaving += c.chunks
        self._replan = True
        c.state = State.REVOKING
        self._out.append(Evict(c.name, c.generation, reason, key))
        ack = c.mapped and (self.rules.strict or c.mutable)
        if c.mapped:
            self._out.append(Revoke(c.session, c.name, c.generation, ack))
        if ack:
            self._acks[c.generation] = (self._now + self.rules.ack_timeout_s, c)
        else:
            self._take_out(c)

    def _take_out(self, c: Component) -> None:
        """The worker can no longer write: save what it wrote, or just drop it."""
        c.mapped = False
        if c.dirty:
            c.state = State.WRITING_BACK
            self.moves[c.generation] = Move(c, c.runs)
            self._out.append(CopyOut(c.uid, c.name, c.generation, c.nbytes, c.runs))
        else:
            self._vacate(c, bytes_back=0)

    def _vacate(self, c: Component, bytes_back: int) -> None:
        self._leaving -= c.chunks
        self.pool.give(c.runs)
        c.state = State.ABSENT
        c.evicting_for = None
        c.evictions += 1
        self.evictions += 1
        self._out.append(Evicted(c.name, c.generation, c.nbytes, bytes_back))
        if c.unregistering:
            self._finish_unregister(c)
        self._replan = True

    def _accept(self, c: Component) -> None:
        """Answer the register, commit or unregister that waited for this."""
        assert c.answer is not None
        self._out.append(Accept(c.session, c.answer))
        c.answer = None

    def _finish_unregister(self, c: Component) -> None:
        self._accept(c)
        self._remove(c)
        self._drop_master(c)

    def _remove(self, c: Component) -> None:
        """The name is free again. Chunks and master are the caller's to settle."""
        del self.components[c.name]
        if session := self.sessions.get(c.session):
            session.owns.pop(c.name, None)
        self.idle.pop(c.name, None)
        self.leased.pop(c.name, None)
        self._prefetch.pop(c.name, None)
        self._unwant(c.name)
        if c.group is not None and (mates := self._groups.get(c.group)):
            mates.pop(c.name, None)
            if not mates:
                del self._groups[c.group]

    def _strand(self, c: Component, alive: bool) -> None:
        """The owner is gone: free what can be freed now, the rest when its copy ends."""
        if c.mutable and c.dirty:
            self._out.append(Lost(c.name, c.generation, explain.lost(c)))
        for key in c.leases:
            self.leases[key].names = tuple(n for n in self.leases[key].names if n != c.name)
        self._acks.pop(c.generation, None)
        if c.evicting:
            self._leaving -= c.chunks
        copying = c.generation in self.moves
        if c.on_device and not copying:
            if alive and c.mutable and c.mapped:
                self.quarantined.setdefault(c.session, []).append(c.runs)
                self._room_shrank = True
            else:
                self.pool.give(c.runs)
        being_made = c.state is State.FILLING and c.answer is not None
        self._remove(c)
        if not copying and not being_made:
            self._drop_master(c)

    def _abandon(self, move: Move) -> None:
        """A copy ended that nobody wants any more."""
        self.pool.give(move.runs)
        self._drop_master(move.component)
        self._replan = True

    def _is_current(self, c: Component) -> bool:
        return self.components.get(c.name) is c

    def _drop_master(self, c: Component) -> None:
        del self._masters[c.uid]
        self._out.append(DropMaster(c.uid, c.name))
