"""The residency of every component on one device: events in, actions out.

`handle(event)` applies one event and returns what must now be done, in order; `README.md`
beside this file has states, events, actions and rules. Lives here: what each event means.
The facts and their transitions are in `ledger.py`, who waits in `admission.py`, and every
decision about eviction in `planner.py` (`make_room`) and `policy.py`. May not live in any
of them: clocks, logging, sockets, memory, torch.

A decision is recorded in the state at the moment it is made.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any, ClassVar

from swapd.core import (
    coming,
    explain,
    gone,
    inheriting,
    leases,
    leaving,
    policy,
    registry,
    updates,
    verdict,
    workspaces,
)
from swapd.core.actions import AnyAction, Fence, Lost
from swapd.core.admission import Admission
from swapd.core.events import (
    Acquire,
    AcquireWorkspace,
    AnyEvent,
    Cancel,
    Commit,
    CopiedIn,
    CopiedOut,
    CopyFailed,
    DeviceDown,
    GiveUp,
    Lent,
    LetGo,
    MasterFailed,
    MasterMade,
    MasterSealed,
    Prefetch,
    ProcessExited,
    Reclaimed,
    Register,
    Release,
    Resize,
    Revoked,
    SessionEnds,
    SessionGone,
    SessionOpened,
    Stopping,
    Tick,
    Unregister,
    Update,
)
from swapd.core.ledger import Ledger
from swapd.core.planner import Planner
from swapd.core.policy import Rules
from swapd.core.records import WORKSPACE, Component, Key, Move, Session, State, workspace_name
from swapd.protocol import REST, Code, part_name
from swapd.units import size


class Residency:
    """What is on one device of `chunks` chunks, and everything decided about it.

    Synchronous and single-threaded: one caller, one event at a time, in order of time.
    """

    def __init__(self, chunks: int, chunk_bytes: int, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()
        #: To be read: what is where, and who waits. Only `handle` may change them.
        self.ledger = Ledger(chunks, chunk_bytes, self.rules)
        self.admission = Admission(self.ledger)
        self.stopping = False
        self._planner = Planner(self.ledger, self.admission)

    def __repr__(self) -> str:
        ledger = self.ledger
        used = (ledger.pool.total - ledger.pool.free) * ledger.chunk_bytes
        total = ledger.pool.total * ledger.chunk_bytes
        loading = [c.name for c in ledger.components.values() if c.state is State.LOADING]
        return (
            f"<Residency {size(used)}/{size(total)}, "
            f"{len(ledger.leases)} leases, {len(self.admission.queue)} waiting, "
            f"loading {', '.join(loading) or 'nothing'}>"
        )

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Apply one event; return what must now be done, in order."""
        ledger = self.ledger
        ledger.now = event.now
        self._on[type(event)](self, event)
        if ledger.room_differs:
            for name in ledger.automatic:
                self._spread(name, None)
            ledger.room_differs = False
        while ledger.replan:
            self._planner.plan()
        out, ledger.out = ledger.out, []
        return out

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest, on the events' clock; None if none is."""
        plan_at = self._planner.next_deadline()
        if not self.ledger.acks:
            return plan_at
        ack_at = next(iter(self.ledger.acks.values()))[0]
        return ack_at if plan_at is None else min(plan_at, ack_at)

    @property
    def quiet(self) -> bool:
        """Whether no lease is held and nothing is being saved; workspaces may be on their way, and
        loads that nobody waits for."""
        moves = self.ledger.moves.values()
        ends = (State.RECLAIMING, State.LOADING)
        return not self.ledger.leases and all(m.component.state in ends for m in moves)

    # --- registration --------------------------------------------------------------------

    def _on_session_opened(self, event: SessionOpened) -> None:
        self.ledger.sessions[event.session] = Session(event.label)

    def _on_register(self, event: Register) -> None:
        chunks = self.ledger.chunks_for(event.nbytes)
        if problem := self._unregisterable(event, chunks):
            self.ledger.refuse((event.session, event.request), *problem)
        else:
            registry.register(self.ledger, event, chunks)

    def _unregisterable(self, event: Register, chunks: int) -> tuple[Code, str] | None:
        """Why a component may not be registered, or None if it may."""
        ledger = self.ledger
        if event.session not in ledger.sessions:
            return "bad_request", explain.REPLAYED
        if event.nbytes < 0:
            return "bad_request", explain.SIZE
        if event.name.startswith(WORKSPACE):
            return "bad_request", explain.RESERVED
        if self.stopping:
            return "stopping", explain.STOPPING
        if problem := self._misnamed(event):
            return problem
        if (event.policy == "alternating") != (event.group is not None):
            return "bad_request", explain.GROUP
        fixed = ledger.never_leaving() if event.policy == "resident" else 0
        if chunks + fixed > ledger.pool.total:
            return "too_large", explain.too_large(ledger, event.name, chunks, fixed)
        return None

    def _misnamed(self, event: Register) -> tuple[Code, str] | None:
        """A name is one component's, or one family's, which belongs to one session."""
        ledger = self.ledger
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

    def _on_master_made(self, event: MasterMade) -> None:
        ledger, c = self.ledger, self._made_or_sealed(event.uid)
        if c is None:
            return
        if c.renewal is not None:
            updates.answer(ledger, c, c.renewal)
        else:
            registry.answer(ledger, c)

    def _on_commit(self, event: Commit) -> None:
        ledger, key = self.ledger, (event.session, event.request)
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

    def _on_master_sealed(self, event: MasterSealed) -> None:
        ledger, c = self.ledger, self._made_or_sealed(event.uid)
        if c is None:
            return
        if c.renewal is not None:
            updates.sealed(ledger, c, c.renewal)
        else:
            registry.commit(ledger, c)
            self.admission.unpark(c)

    def _on_master_failed(self, event: MasterFailed) -> None:
        """A component whose first master fails is gone; an update that fails changes nothing."""
        ledger, c = self.ledger, self._made_or_sealed(event.uid)
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

    def _made_or_sealed(self, uid: int) -> Component | None:
        """A master was made or sealed, or failed; None if nobody wants it any more."""
        ledger, c = self.ledger, self.ledger.masters[uid]
        ledger.making.discard(uid)
        wanted = c.renewal.uid if c.renewal is not None else c.uid
        if ledger.is_current(c) and uid == wanted:
            return c
        registry.drop_master(ledger, uid)
        return None

    # --- new bytes for a component -------------------------------------------------------

    def _on_update(self, event: Update) -> None:
        ledger, key = self.ledger, (event.session, event.request)
        c = ledger.components.get(event.name)
        if c is None or not ledger.may_be_acquired(event.name):
            return ledger.refuse(key, "unknown_component", explain.unknown(ledger, event.name))
        if c.session != event.session:
            return ledger.refuse(key, "not_owner", explain.not_owner(ledger, c, "update"))
        if c.mutable:
            return ledger.refuse(key, "bad_request", explain.written_under_a_lease(c))
        if self.stopping:
            return ledger.refuse(key, "stopping", explain.STOPPING)
        if c.renewal is not None:
            return ledger.refuse(key, "in_use", explain.being_updated(c))
        updates.begin(ledger, c, event.request)

    def _on_give_up(self, event: GiveUp) -> None:
        ledger, key = self.ledger, (event.session, event.request)
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

    def _on_unregister(self, event: Unregister) -> None:
        ledger, key = self.ledger, (event.session, event.request)
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
        self.admission.turn_away(c, explain.unregistered(c))
        if not ledger.is_current(c):
            return  # the last promise on it fell, and with it the component
        if c.state is State.RESIDENT:
            leaving.go(ledger, c)
        elif c.state in (State.ABSENT, State.FILLING):
            registry.finish_unregister(ledger, c)

    # --- leases --------------------------------------------------------------------------

    def _on_acquire(self, event: Acquire) -> None:
        ledger, key = self.ledger, (event.session, event.request)
        if problem := self._unheard(key):
            return ledger.refuse(key, *problem)
        w = self.admission.waiter(event)
        missing = [n for n in w.names if not ledger.may_be_acquired(n)]
        missing.sort(key=lambda n: not n.startswith(WORKSPACE))
        if missing and (not w.wait or missing[0].startswith(WORKSPACE)):
            return ledger.refuse(key, "unknown_component", explain.unknown(ledger, missing[0]))
        self.admission.ask(w, missing)

    def _on_acquire_workspace(self, event: AcquireWorkspace) -> None:
        ledger, key = self.ledger, (event.session, event.request)
        if problem := self._unheard(key):
            return ledger.refuse(key, *problem)
        if workspace_name(*key) in ledger.components:
            return ledger.refuse(key, "bad_request", explain.REPLAYED)  # it is on its way back
        if event.nbytes <= 0:
            return ledger.refuse(key, "bad_request", explain.WORKSPACE_SIZE)
        name = workspaces.open_one(ledger, key, event.nbytes, ledger.chunks_for(event.nbytes))
        asked = Acquire(event.now, *key, event.agent, (name,), event.priority, event.deadline)
        self.admission.ask(self.admission.waiter(asked), [])

    def _unheard(self, key: Key) -> tuple[Code, str] | None:
        """Why an acquire is refused whatever it asks for, or None."""
        session = self.ledger.sessions.get(key[0])
        if session is None or key[1] in session.waiters or key[1] in session.leases:
            return "bad_request", explain.REPLAYED
        return ("stopping", explain.STOPPING) if self.stopping else None

    def _on_release(self, event: Release) -> None:
        # Released before, or its session is gone: nothing to do.
        if leases.take_back(self.ledger, (event.session, event.lease), again=event.again):
            self.ledger.replan |= self.admission.somebody_waits

    def _on_cancel(self, event: Cancel) -> None:
        if w := self.admission.queue.get((event.session, event.acquire)):
            self.admission.forget(w)
        else:
            self._on_release(Release(event.now, event.session, event.acquire))

    def _on_prefetch(self, event: Prefetch) -> None:
        ledger, key = self.ledger, (event.session, event.request)
        if self.stopping:
            return ledger.refuse(key, "stopping", explain.STOPPING)
        names = ledger.expand(event.names)
        for name in names:
            if not ledger.may_be_acquired(name):
                return ledger.refuse(key, "unknown_component", explain.unknown(ledger, name))
            if (c := ledger.components[name]).damaged:
                return ledger.refuse(key, "device_failed", explain.damaged(c))
            if ledger.down and (problem := verdict.cannot_come_in(ledger, [c], None)):
                return ledger.refuse(key, "device_failed", explain.refused(ledger, problem))
        ledger.prefetches.update(dict.fromkeys(names))
        ledger.accept(key)
        ledger.replan = True

    def _on_resize(self, event: Resize) -> None:
        ledger, key = self.ledger, (event.session, event.request)
        if event.name not in ledger.families:
            return ledger.refuse(key, "unknown_component", explain.no_family(ledger, event.name))
        if event.resident_bytes is not None and event.resident_bytes < 0:
            return ledger.refuse(key, "bad_request", explain.SIZE)
        if problem := self._never_stays(event.name):
            return ledger.refuse(key, *problem)
        if event.resident_bytes is None:
            ledger.automatic[event.name] = None
        else:
            ledger.automatic.pop(event.name, None)
        self._spread(event.name, event.resident_bytes)
        ledger.accept(key)

    def _never_stays(self, name: str) -> tuple[Code, str] | None:
        """Why what is in no block of a family cannot stay for good, or None if it can, or need
        not: some other part must fit beside it."""
        ledger, family = self.ledger, self.ledger.families[name]
        rest = family.get(part_name(name, REST))
        if rest is None or rest.own_policy != "resident":
            return None
        others = (c.chunks for c in family.values() if c is not rest)
        least = rest.chunks + max(others, default=0)
        fixed = ledger.never_leaving(family.values())
        if least + fixed <= ledger.pool.total:
            return None
        return "too_large", explain.too_large(ledger, name, least, fixed, explain.LESS_RESIDENT)

    def _spread(self, name: str, resident_bytes: int | None) -> None:
        """Keep so much of a family; None: as much as there is room for beside what never leaves."""
        ledger, family = self.ledger, self.ledger.families[name]
        first = [c for c in family.values() if c.name == part_name(name, REST)]
        others = [c for c in family.values() if c not in first]
        sizes = [c.chunks for c in others]
        room = ledger.pool.total - ledger.never_leaving(family.values())
        room -= sum(c.chunks for c in first)
        if resident_bytes is None:
            kept = policy.spread(sizes, policy.room_to_keep(sizes, room, beside=2))
        else:
            asked = resident_bytes - sum(c.nbytes for c in first)
            kept = policy.spread([c.nbytes for c in others], asked)
            most = policy.room_to_keep(sizes, room, beside=1)
            kept = kept if sum(sizes[i] for i in kept) <= most else policy.spread(sizes, most)
        for c in first:
            leaving.set_kept(ledger, c, True)
        for i, c in enumerate(others):
            leaving.set_kept(ledger, c, i in kept)

    # --- what was slow has ended ---------------------------------------------------------

    def _on_revoked(self, event: Revoked) -> None:
        pending = self.ledger.acks.get(event.generation)
        if pending is None or pending[1].session != event.session:
            return  # stale, or a lie: it changes nothing
        del self.ledger.acks[event.generation]
        leaving.take_out(self.ledger, pending[1])

    def _on_copied_in(self, event: CopiedIn) -> None:
        ledger = self.ledger
        move = ledger.moves.pop(event.generation)
        c = move.component
        ledger.bytes_in += c.nbytes
        if not ledger.is_current(c):
            return gone.abandon(ledger, move)
        updates.end_copy_of(ledger, move)
        coming.loaded(ledger, c)
        self.admission.let_in(c)
        leaving.settle(ledger, c)
        self.admission.share(c)
        ledger.replan = True

    def _on_copied_out(self, event: CopiedOut) -> None:
        ledger = self.ledger
        move, heirs = inheriting.end_move(ledger, event.generation)
        c = move.component
        ledger.bytes_out += c.nbytes
        if ledger.is_current(c):
            c.dirty = False
            leaving.vacate(ledger, c, move.runs, bytes_back=c.nbytes)
        else:
            gone.abandon(ledger, move)
        for heir in heirs:
            self.admission.let_in(heir)

    def _on_copy_failed(self, event: CopyFailed) -> None:
        """A load that failed leaves the component absent, a write-back leaves it resident.

        Nothing is lost either way, unless the write-back is `damaged`; who waited for the
        copy is refused, and who was let in before it ended is told.
        """
        ledger = self.ledger
        move, _ = inheriting.end_move(ledger, event.generation)
        c = move.component
        if c.workspace:
            return self._lend_failed(c, event.why)
        if not ledger.is_current(c):
            return gone.abandon(ledger, move)
        updates.end_copy_of(ledger, move)
        if c.state is State.LOADING:
            self._load_failed(c, move, explain.copy_failed(ledger, c, event.why))
        else:
            self._write_back_failed(c, move, event)
        ledger.replan = True

    def _load_failed(self, c: Component, move: Move, why: str) -> None:
        leases.break_all(self.ledger, c, why)
        coming.load_failed(self.ledger, c, move)
        for key in list(c.promised):
            self.admission.refuse(key, "device_failed", why)

    def _write_back_failed(self, c: Component, move: Move, event: CopyFailed) -> None:
        """Loads that inherited from it have failed before."""
        ledger, admission = self.ledger, self.admission
        if c.evicting_for is None:
            ledger.prefetches.clear()  # it may have been for one: do not try forever
        waiter = c.evicting_for and admission.queue.get(c.evicting_for)
        why = explain.copy_failed(ledger, c, event.why, damaged=event.damaged)
        if event.damaged:
            leaving.lose(ledger, c, move, why)
        else:
            leaving.write_back_failed(ledger, c, move)
        if waiter and waiter.queued:  # else it found room without this
            admission.refuse(waiter.key, "device_failed", why)
        if c.unregistering:
            assert c.answer is not None
            ledger.refuse((c.session, c.answer), "device_failed", why)
            c.answer = None
            registry.set_unregistering(ledger, c, False)
        if event.damaged:
            for key in list(c.waiting):
                admission.refuse(key, "device_failed", explain.damaged(c))
        else:
            leaving.make_idle(ledger, c)
            admission.share(c)
        admission.unpark(c)

    def _lend_failed(self, c: Component, why: str) -> None:
        workspaces.came_back(self.ledger, c)
        for key in list(c.promised):
            self.admission.refuse(key, "device_failed", explain.lend_failed(self.ledger, c, why))

    def _on_lent(self, event: Lent) -> None:
        ledger = self.ledger
        c = ledger.moves.pop(event.generation).component
        if c.state is State.RECLAIMING:
            return workspaces.reclaim(ledger, c)
        coming.loaded(ledger, c)
        self.admission.let_in(c)
        ledger.replan = True

    def _on_reclaimed(self, event: Reclaimed) -> None:
        workspaces.came_back(self.ledger, self.ledger.moves.pop(event.generation).component)

    def _on_device_down(self, event: DeviceDown) -> None:
        """Nobody hears of it but who waits for what is not on the device, now or later.

        Copies in flight still end, in events of their own. The first reason is kept.
        """
        ledger = self.ledger
        ledger.down = ledger.down or event.why
        ledger.prefetches.clear()
        ledger.replan = True

    # --- time, and the end ---------------------------------------------------------------

    def _on_tick(self, event: Tick) -> None:
        ledger = self.ledger
        while ledger.acks:
            deadline, c = next(iter(ledger.acks.values()))
            if deadline > event.now:
                break
            del ledger.acks[c.generation]
            session = ledger.sessions[c.session]
            if not session.fenced:
                session.fenced = True
                ledger.out.append(Fence(c.session, explain.fenced(c, self.rules.ack_timeout_s)))
        ledger.replan = True

    def _on_stopping(self, event: Stopping) -> None:
        self.stopping = True
        self.ledger.prefetches.clear()
        for w in list(self.admission.queue):
            self.admission.refuse(w.key, "stopping", explain.STOPPING)

    def has_more(self, session: int, most: int) -> bool:
        """Whether a session has more than that, so that its end takes several steps."""
        known = self.ledger.sessions.get(session)
        if known is None:
            return False
        if len(known.waiters) + len(known.leases) + len(known.owns) > most:
            return True
        owned = (self.ledger.components[name] for name in known.owns)
        return sum(len(c.waiting) + len(c.promised) for c in owned) > most

    def _on_session_ends(self, event: SessionEnds) -> None:
        """First who waits for it, so that it is granted nothing; then what it owns and holds."""
        ledger, left = self.ledger, event.most
        session = ledger.sessions.get(event.session)
        if session is None:
            return
        for request in list(islice(session.waiters, left)):
            left -= 1
            if w := self.admission.queue.get((event.session, request)):
                self.admission.forget(w)
        for name in list(islice(session.owns, left)):
            if left > 0:
                left -= self._end(ledger.components[name], event.alive, left)
        for request in list(islice(session.leases, max(left, 0))):
            leases.take_back(ledger, (event.session, request))
        ledger.replan = True

    def _end(self, c: Component, alive: bool, most: int) -> int:
        """End a component, or the waits of so many that wait for it; return how many steps."""
        c.ending = True
        waiters = len(c.waiting) + len(c.promised)
        why = explain.owner_gone(c, self.ledger.sessions[c.session].label)
        self.admission.turn_away(c, why, most)
        if waiters > most or not self.ledger.is_current(c):
            return most
        if c.mutable and c.dirty:
            self.ledger.out.append(Lost(c.name, c.generation, explain.lost(c)))
        gone.strand(self.ledger, c, alive)
        return waiters + 1

    def _on_session_gone(self, event: SessionGone) -> None:
        ledger, admission = self.ledger, self.admission
        session = ledger.sessions.pop(event.session, None)
        if session is None:
            return
        for name in session.told:
            ledger.wanted[name].discard(event.session)
        ledger.hurried.discard(event.session)
        ledger.unhurried.pop(event.session, None)
        for c in session.makes_way.values():
            c.evicting_for = None
        owned = [ledger.components[name] for name in session.owns]
        for c in owned:
            if c.mutable and c.dirty:
                ledger.out.append(Lost(c.name, c.generation, explain.lost(c)))
            gone.strand(ledger, c, event.alive)
        for request in list(session.waiters):
            if w := admission.queue.get((event.session, request)):
                admission.forget(w)
        for request in list(session.leases):
            leases.take_back(ledger, (event.session, request))
        for c in owned:
            admission.turn_away(c, explain.owner_gone(c, session.label))
        ledger.replan = True

    def _on_let_go(self, event: ProcessExited | LetGo) -> None:
        gone.end_quarantine(self.ledger, event.session)
        self.ledger.replan = True

    _on: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        Acquire: _on_acquire,
        AcquireWorkspace: _on_acquire_workspace,
        Release: _on_release,
        CopiedIn: _on_copied_in,
        CopiedOut: _on_copied_out,
        CopyFailed: _on_copy_failed,
        Lent: _on_lent,
        Reclaimed: _on_reclaimed,
        DeviceDown: _on_device_down,
        Revoked: _on_revoked,
        Tick: _on_tick,
        Cancel: _on_cancel,
        Prefetch: _on_prefetch,
        Resize: _on_resize,
        Register: _on_register,
        MasterMade: _on_master_made,
        Commit: _on_commit,
        MasterSealed: _on_master_sealed,
        MasterFailed: _on_master_failed,
        Update: _on_update,
        GiveUp: _on_give_up,
        Unregister: _on_unregister,
        SessionOpened: _on_session_opened,
        SessionEnds: _on_session_ends,
        SessionGone: _on_session_gone,
        ProcessExited: _on_let_go,
        LetGo: _on_let_go,
        Stopping: _on_stopping,
    }
