"""What is left of a session that is gone: its components, copies under way, and chunks to which its
process may still write.
"""

from swapd.core import inheriting, leases, leaving, registry, workspaces
from swapd.core.chunks import count
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Move, State
from swapd.shared.protocol import Runs


def strand(ledger: Ledger, c: Component, *, alive: bool, ending: bool) -> None:
    """The owner is gone: free what can be freed now, the rest when its copy ends."""
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
        ledger.leaving -= count(move.runs if move else c.runs)
    if move:
        inheriting.bar(ledger, move)
    # what could not be saved is nowhere else: its process may go on with it where it is
    unsaved = c.dirty and c.state is State.RESIDENT
    writer = c.session if alive and c.mutable and (c.mapped or unsaved) else None
    if writer is not None:
        ledger.quarantined.setdefault(writer, [])  # perhaps to be added when a copy ends
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
    """A copy ended that nobody wants any more."""
    inheriting.hand_back(ledger, move)
    _free(ledger, move.runs, move.writer)
    registry.drop_master(ledger, move.uid)
    ledger.replan = True


def _free(ledger: Ledger, runs: Runs, writer: int | None) -> None:
    """Nobody uses these chunks; `writer` may write to them until its process ends."""
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
    """Its process has ended: nobody can write to these chunks any more."""
    for runs in ledger.quarantined.pop(session, ()):
        if session in ledger.dying:
            ledger.leaving -= count(runs)
        else:
            ledger.fixed -= count(runs)
        ledger.pool.give(runs)
    ledger.dying.discard(session)
