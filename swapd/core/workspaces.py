"""Workspaces: chunks that are lent to an allocator, for one lease."""

from swapd.core import registry, telling
from swapd.core.actions import Reclaim
from swapd.core.chunks import count, without
from swapd.core.counts import OTHERS
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Key, Move, workspace_name
from swapd.core.states import State
from swapd.shared.protocol import Runs


def open_one(ledger: Ledger, key: Key, nbytes: int, chunks: int) -> str:
    """Add a workspace for a waiter; return its name."""
    session, name = key[0], workspace_name(*key)
    c = Component(0, name, session, nbytes, chunks, "sequential", None, False, workspace=True)
    c.tally = ledger.counts.of[OTHERS]
    c.state = State.ABSENT
    ledger.components[name] = c
    ledger.sessions[session].owns[name] = None
    return name


def close(ledger: Ledger, c: Component) -> None:
    """No request needs it any more: remove it, or reclaim it first."""
    if c.state is State.ABSENT:
        registry.remove(ledger, c)
    elif c.state in (State.LOADING, State.RESIDENT):
        is_lent = c.state is State.RESIDENT
        c.enter(State.RECLAIMING)
        ledger.leaving += c.chunks
        ledger.reclaiming += c.chunks
        telling.unwant(ledger, c.name)
        ledger.replan = True
        if is_lent:
            reclaim(ledger, c)


def reclaim(ledger: Ledger, c: Component) -> None:
    """Take its memory back. Not while it is being lent."""
    ledger.moves[c.generation] = Move(c, c.uid, c.runs, ledger.now)
    ledger.out.append(Reclaim(c.name, c.generation, c.runs))


def came_back_in_part(ledger: Ledger, move: Move, runs: Runs) -> None:
    """The arena has these chunks of a workspace again, and others may use them. The rest is still
    out."""
    c = move.component
    ledger.pool.give(runs)
    c.runs = move.runs = without(move.runs, runs)
    chunks = count(runs)
    c.chunks -= chunks
    c.nbytes = c.chunks * ledger.chunk_bytes  # the part that is still out
    ledger.leaving -= chunks
    ledger.reclaiming -= chunks
    ledger.replan = True


def came_back(ledger: Ledger, c: Component) -> None:
    """The arena has all chunks of the workspace: taken back, or never given away."""
    ledger.pool.give(c.runs)
    if c.state is State.RECLAIMING:
        ledger.leaving -= c.chunks
        ledger.reclaiming -= c.chunks
    c.enter(State.ABSENT)
    ledger.replan = True
    if ledger.is_current(c) and not c.promised:
        registry.remove(ledger, c)
