"""Cleans up after a session that is gone: its components, its copies in flight, and chunks to which
its process may still write."""

from swapd.core import leases, leaving, registry, workspaces
from swapd.core.chunks import count
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Move, State
from swapd.shared.protocol import Runs


def strand(ledger: Ledger, c: Component, *, alive: bool, ending: bool) -> None:
    """The owner is gone: free now as much as possible, the rest when its copy ends."""
    leases.take_from_all(ledger, c)
    leaving.leave_room(ledger, c)
    if c.workspace:
        workspaces.close(ledger, c)
        if ledger.is_current(c):
            registry.remove(ledger, c)
        return
    ledger.acks.pop(c.generation, None)
    move = ledger.moves.get(c.generation)
    if c.evicting:
        ledger.leaving -= c.chunks
    # unsaved bytes are only on the device: the process may go on with them there
    unsaved = c.dirty and c.state is State.RESIDENT
    writer = c.session if alive and c.mutable and (c.mapped or unsaved) else None
    if writer is not None:
        ledger.quarantined.setdefault(writer, [])  # a copy in flight may add chunks when it ends
        if ending:
            ledger.dying.add(writer)
    if move:
        move.writer = writer
    elif c.on_device:
        _free(ledger, c.runs, writer)
    registry.remove(ledger, c)
    if not (move and move.uid == c.uid):
        registry.drop_master(ledger, c.uid)
    if c.renewal is not None:
        registry.drop_master(ledger, c.renewal.uid)
        c.renewal = None


def abandon(ledger: Ledger, move: Move) -> None:
    """A copy of a component that is gone has ended."""
    _free(ledger, move.runs, move.writer)
    registry.drop_master(ledger, move.uid)
    ledger.replan = True


def _free(ledger: Ledger, runs: Runs, writer: int | None) -> None:
    """Free these chunks; if `writer` may still write to them, only when its process ends."""
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
    """Its process has ended, or has unmapped them: free these chunks."""
    for runs in ledger.quarantined.pop(session, ()):
        if session in ledger.dying:
            ledger.leaving -= count(runs)
        else:
            ledger.fixed -= count(runs)
        ledger.pool.give(runs)
    ledger.dying.discard(session)
