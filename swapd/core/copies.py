"""Handles the end of slow actions, a copy or a loan, and the loss of the device."""

from swapd.core import admission, explain, leases, registry, sessions, transfers
from swapd.core.events import (
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
from swapd.core.records import Component, State, Transfer


def on_revoked(ledger: Ledger, event: RevokeAck) -> None:
    pending = ledger.acks.get(event.generation)
    if pending is None or pending[1].session != event.session:
        return  # stale, or a breach of the protocol: change nothing
    del ledger.acks[event.generation]
    transfers.take_out(ledger, pending[1])


def on_copied_in(ledger: Ledger, event: CopiedIn) -> None:
    move = ledger.moves.pop(event.generation)
    c = move.component
    copy_s = transfers.copied(ledger, move, c.bytes_in, ledger.counts.copy_in_s, event.took_s)
    if not ledger.is_current(c):
        return sessions.abandon(ledger, move)
    _end_copy_of(ledger, move)
    if c.state is State.STOPPING:
        return transfers.stopped(ledger, c)
    ledger.idle.drop(c)
    transfers.loaded(ledger, c, copy_s)
    admission.let_in(ledger, c)
    transfers.settle(ledger, c)
    admission.share(ledger, c)
    ledger.replan = True


def on_copy_stopped(ledger: Ledger, event: CopyStopped) -> None:
    move = ledger.moves.pop(event.generation)
    if not ledger.is_current(move.component):
        return sessions.abandon(ledger, move)
    _end_copy_of(ledger, move)
    transfers.stopped(ledger, move.component)


def on_copied_out(ledger: Ledger, event: CopiedOut) -> None:
    move = ledger.moves.pop(event.generation)
    c = move.component
    nbytes = c.bytes_back
    transfers.copied(ledger, move, nbytes, ledger.counts.copy_out_s)
    if ledger.is_current(c):
        transfers.saved(ledger, c, nbytes)
    else:
        sessions.abandon(ledger, move)


def on_copy_failed(ledger: Ledger, event: CopyFailed) -> None:
    """A load that failed leaves the component absent; a write-back that failed leaves it resident.

    Neither loses bytes. Scratch whose write-back failed leaves anyway. The core refuses waiters for
    the copy, and tells holders that were granted it early.
    """
    move = ledger.moves.pop(event.generation)
    c = move.component
    if move.lane is None:
        return _lend_failed(ledger, c, event.why)
    move.lane.ended_at = event.now
    if not ledger.is_current(c):
        return sessions.abandon(ledger, move)
    _end_copy_of(ledger, move)
    if c.state is State.STOPPING:
        transfers.stopped(ledger, c)
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
        ledger.prefetches.clear()  # it may have been for one: do not try forever
    waiter = c.evicting_for and ledger.queue.get(c.evicting_for)
    why = explain.copy_failed(ledger, c, why)
    transfers.write_back_failed(ledger, c)
    if waiter and waiter.queued:  # else it found room without this
        admission.refuse(ledger, waiter.key, "device_failed", why)
    if c.unregistering:
        assert c.answer is not None
        ledger.refuse((c.session, c.answer), "device_failed", why, names=(c.name,))
        c.answer = None
        registry.set_unregistering(ledger, c, False)
    transfers.make_idle(ledger, c, since=ledger.now)  # others are tried before it
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
    move = ledger.moves[event.generation]
    if event.runs:
        return transfers.reclaimed_in_part(ledger, move, event.runs)
    transfers.reclaimed(ledger, ledger.moves.pop(event.generation).component)


def on_device_down(ledger: Ledger, event: DeviceDown) -> None:
    """Refuse waiters for components that are not on the device, now or later; no other session
    notices.

    Copies in flight still end, with events of their own. The first reason is kept.
    """
    ledger.down = ledger.down or event.why
    ledger.prefetches.clear()
    ledger.replan = True


def _end_copy_of(ledger: Ledger, move: Transfer) -> None:
    """Drop the host copy that was kept for this copy, if the component has another by now."""
    if move.uid != move.component.uid:
        registry.let_go_of_host_copy(ledger, move.uid)
