"""The core: events in, actions out. `README.md` has its states, events, actions and rules.

No file of the core may use clocks, logging, sockets, memory or torch.
"""

from collections.abc import Callable
from typing import Any

from swapd.core import (
    admission,
    events,
    explain,
    families,
    leases,
    prefetch,
    registration,
    registry,
    requests,
    sessions,
    transfers,
)
from swapd.core.actions import AnyAction
from swapd.core.events import (
    AnyEvent,
    CopiedIn,
    CopiedOut,
    CopyFailed,
    CopyStopped,
    DeviceDown,
    Lent,
    Reclaimed,
    RevokeAck,
)
from swapd.core.ledger import Ledger
from swapd.core.planner import Planner
from swapd.core.records import Component, Key, Rules, Transfer
from swapd.core.states import State
from swapd.shared import protocol
from swapd.shared.units import size


def on_revoked(ledger: Ledger, event: RevokeAck) -> None:
    pending = ledger.acks.get(event.generation)
    if pending is None or pending[1].session != event.session:
        return  # stale, or a breach of the protocol
    del ledger.acks[event.generation]
    transfers.take_out(ledger, pending[1])


def on_copied_in(ledger: Ledger, event: CopiedIn) -> None:
    move = ledger.moves.pop(event.generation)
    c = move.component
    copy_s = None
    if move.lane is not None:
        times = ledger.counts.copy_in_s
        copy_s = transfers.copied(ledger, move, c.bytes_in, times, event.took_s)
    if not _is_still_there(ledger, move):
        return
    if c.state is State.STOPPING:
        return transfers.vacate(ledger, c)
    ledger.idle.drop(c)
    transfers.loaded(ledger, c, copy_s)
    admission.let_in(ledger, c)
    transfers.settle(ledger, c)
    admission.share(ledger, c)
    ledger.replan = True


def on_copy_stopped(ledger: Ledger, event: CopyStopped) -> None:
    move = ledger.moves.pop(event.generation)
    if _is_still_there(ledger, move):
        transfers.vacate(ledger, move.component)


def on_copied_out(ledger: Ledger, event: CopiedOut) -> None:
    move = ledger.moves.pop(event.generation)
    transfers.copied(ledger, move, move.component.bytes_back, ledger.counts.copy_out_s)
    if _is_still_there(ledger, move):
        transfers.saved(ledger, move.component)


def on_copy_failed(ledger: Ledger, event: CopyFailed) -> None:
    """After a failed load the component is absent; after a failed write-back it is resident, unless
    it is scratch, which leaves. Other bytes are not lost. Waiters for the copy are refused; holders
    that were granted it early are told."""
    move = ledger.moves.pop(event.generation)
    c = move.component
    if move.lane is None:
        return _lend_failed(ledger, c, event.why)
    move.lane.ended_at = event.now
    if not _is_still_there(ledger, move):
        return
    if c.state is State.STOPPING:
        transfers.vacate(ledger, c)
    elif c.state is State.LOADING:
        _load_failed(ledger, c, explain.copy_failed(ledger, c, event.why))
    elif c.scratch and not ledger.down:
        transfers.save_failed(ledger, c, explain.not_saved(c, event.why))
    else:
        _write_back_failed(ledger, c, event.why)
    ledger.replan = True


def _load_failed(ledger: Ledger, c: Component, why: str) -> None:
    leases.break_all(ledger, c, why)
    transfers.load_failed(ledger, c)
    for key in list(c.promised):
        admission.refuse(ledger, key, "device_failed", why)


def _write_back_failed(ledger: Ledger, c: Component, why: str) -> None:
    if c.evicting_for is None:
        ledger.prefetches.clear()  # the eviction may have been for one: do not try forever
    waiter = c.evicting_for and ledger.queue.get(c.evicting_for)
    why = explain.copy_failed(ledger, c, why)
    transfers.write_back_failed(ledger, c)
    if waiter and waiter.queued:  # else it found other room
        admission.refuse(ledger, waiter.key, "device_failed", why)
    if c.unregistering:
        assert c.answer is not None
        ledger.refuse((c.session, c.answer), "device_failed", why, names=(c.name,))
        c.answer = None
        registry.set_unregistering(ledger, c, False)
    transfers.make_idle(ledger, c, since=ledger.now)  # behind other candidates
    admission.share(ledger, c)
    admission.unpark(ledger, c)


def _lend_failed(ledger: Ledger, c: Component, why: str) -> None:
    transfers.reclaimed(ledger, c)
    for key in list(c.promised):
        admission.refuse(ledger, key, "device_failed", explain.lend_failed(ledger, c, why))


def on_lent(ledger: Ledger, event: Lent) -> None:
    c = ledger.moves.pop(event.generation).component
    if c.state is State.RECLAIMING:
        return transfers.reclaim(ledger, c)
    transfers.loaded(ledger, c)
    admission.let_in(ledger, c)
    ledger.replan = True


def on_reclaimed(ledger: Ledger, event: Reclaimed) -> None:
    c = ledger.moves[event.generation].component
    if event.runs:
        return transfers.reclaimed_in_part(ledger, c, event.runs)
    del ledger.moves[event.generation]
    transfers.reclaimed(ledger, c)


def on_device_down(ledger: Ledger, event: DeviceDown) -> None:
    """Refuse waiters for components that are not on the device, now and later. Copies in flight
    still end with events of their own. The first reason is kept."""
    ledger.down = ledger.down or event.why
    ledger.prefetches.clear()
    ledger.replan = True


def _is_still_there(ledger: Ledger, move: Transfer) -> bool:
    """Return whether the component of a copy that has ended is there. Give back what only the copy
    needed: chunks and host copy, if the component is gone; a host copy from before an update."""
    if not ledger.is_current(move.component):
        sessions.abandon(ledger, move)
        return False
    if move.uid != move.component.uid:
        registry.let_go_of_host_copy(ledger, move.uid)
    return True


_HANDLERS: dict[type, Callable[[Ledger, Any], None]] = {
    events.CopiedIn: on_copied_in,
    events.CopyStopped: on_copy_stopped,
    events.CopiedOut: on_copied_out,
    events.CopyFailed: on_copy_failed,
    events.Lent: on_lent,
    events.Reclaimed: on_reclaimed,
    events.DeviceDown: on_device_down,
    events.RevokeAck: on_revoked,
    events.RulesChanged: sessions.on_rules_changed,
    events.Tick: sessions.on_tick,
    events.HostCopyMade: registration.on_host_copy_made,
    events.HostCopySealed: registration.on_host_copy_sealed,
    events.HostCopyFailed: registration.on_host_copy_failed,
    events.HostCopyFound: registration.on_host_copy_found,
    events.MemoryMissing: transfers.missing_at_start,
    events.HostCopiesPinned: lambda ledger, event: None,  # for the record
    events.SessionOpened: sessions.on_session_opened,
    events.SessionEnds: sessions.on_session_ends,
    events.SessionGone: sessions.on_session_gone,
    events.ProcessExited: sessions.on_let_go,
    events.UnmapAck: sessions.on_let_go,
    events.Stopping: sessions.on_stopping,
    events.Dropping: sessions.on_dropping,
    events.DropAck: sessions.on_dropped,
    events.Unread: sessions.on_unread,
}

#: Handlers of requests: `on_x(ledger, key, request)`, at `ledger.now`. All answers go to the key.
_REQUESTS: dict[type, Callable[[Ledger, Key, Any], None]] = {
    protocol.Acquire: admission.on_acquire,
    protocol.AcquireWorkspace: admission.on_acquire_workspace,
    protocol.AcquireStart: leases.on_acquire_start,
    protocol.Release: leases.on_release,
    protocol.Cancel: admission.on_cancel,
    protocol.Prefetch: prefetch.on_prefetch,
    protocol.Follows: prefetch.on_follows,
    protocol.Resize: families.on_resize,
    protocol.Pin: families.on_pin,
    protocol.EvictNow: families.on_evict_now,
    protocol.Register: registration.on_register,
    protocol.Commit: registration.on_commit,
    protocol.Update: registration.on_update,
    protocol.GiveUp: registration.on_give_up,
    protocol.Unregister: registration.on_unregister,
    protocol.Forget: registration.on_forget,
}


#: Requests that begin something, which swapd refuses once it stops.
_BEGINS = (
    *(protocol.Acquire, protocol.AcquireWorkspace, protocol.AcquireStart, protocol.Prefetch),
    *(protocol.Register, protocol.Update, protocol.Resize, protocol.Pin, protocol.EvictNow),
)


class Residency:
    """All components of one device, and all decisions about them.

    Single-threaded: one caller sends one event at a time, in order of time.
    """

    def __init__(self, chunks: int, chunk_bytes: int, rules: Rules | None = None) -> None:
        #: Only `handle` may change it.
        self.ledger = Ledger(chunks, chunk_bytes, rules or Rules())
        self._planner = Planner(self.ledger)
        prefetch.declare_order(self.ledger)

    def __repr__(self) -> str:
        ledger = self.ledger
        used = (ledger.pool.total - ledger.pool.free) * ledger.chunk_bytes
        total = ledger.pool.total * ledger.chunk_bytes
        loading = [c.name for c in ledger.components.values() if c.state is State.LOADING]
        return (
            f"<Residency {size(used)}/{size(total)}, "
            f"{len(ledger.leases)} leases, {len(ledger.queue)} waiting, "
            f"loading {', '.join(loading) or 'nothing'}>"
        )

    @property
    def rules(self) -> Rules:
        return self.ledger.rules

    #: Returns why a request may not become a `SessionRequest`; None if it may.
    problem_with = staticmethod(requests.problem_with)

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Apply one event; return the actions to carry out, in order."""
        ledger = self.ledger
        ledger.now = event.now
        if type(event) is events.SessionRequest:
            asked = ledger.request = event.request
            key = event.session, asked.id
            if ledger.stopping and isinstance(asked, _BEGINS):
                ledger.refuse(key, "stopping", explain.STOPPING)
            else:
                _REQUESTS[type(asked)](ledger, key, asked)
        else:
            _HANDLERS[type(event)](ledger, event)
        if ledger.room_differs:
            for name in ledger.automatic:
                families.keep(ledger, name, None)
            ledger.room_differs = False
        while ledger.replan:
            self._planner.plan()
        out, ledger.out = ledger.out, []
        return out

    def next_deadline(self) -> float | None:
        """Return when the next Tick is due at the latest, on the events' clock; None: never."""
        ledger, acks = self.ledger, self.ledger.acks
        times = (
            self._planner.next_deadline(),
            next(iter(acks.values()))[0] + ledger.rules.ack_timeout_s if acks else None,
            ledger.debts.next(),
            ledger.host.contents.next_deadline(),
            ledger.start_deadlines.next(),
            ledger.expiries.next(),
        )
        return min((at for at in times if at is not None), default=None)

    @property
    def quiet(self) -> bool:
        """Whether no lease is held and nothing is being saved. Loads and workspaces may be in
        flight."""
        moves = self.ledger.moves.values()
        ends = (State.RECLAIMING, State.LOADING, State.STOPPING)
        return not self.ledger.leases and all(m.component.state in ends for m in moves)

    def has_more(self, session: int, most: int) -> bool:
        """Return whether the end of a session takes several steps of `most`."""
        known = self.ledger.sessions.get(session)
        if known is None:
            return False
        if len(known.waiters) + len(known.leases) + len(known.owns) > most:
            return True
        owned = (self.ledger.components[name] for name in known.owns)
        return sum(len(c.waiting) + len(c.promised) for c in owned) > most
