"""How a component comes in."""

from swapd.core import leaving, registry
from swapd.core.actions import CopyIn, Lend
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Move, State


def load(ledger: Ledger, c: Component) -> None:
    c.generation = ledger.next_generation()
    c.state = State.LOADING
    c.load_started = ledger.now
    c.used = c.kept_no_more = False
    c.runs = ledger.pool.take(c.chunks, prefer=c.runs)
    ledger.moves[c.generation] = Move(c, c.uid, c.runs)
    ledger.recount(c)
    ledger.peak_chunks = max(ledger.peak_chunks, ledger.pool.total - ledger.pool.free)
    ledger.prefetches.pop(c.name, None)
    if c.policy == "permanent":
        ledger.room_shrank = ledger.replan = True
    if c.workspace:
        ledger.out.append(Lend(c.session, c.name, c.generation, c.runs))
    else:
        if c.kept == ():
            c.contents = c.generation
        ledger.out.append(CopyIn(c.uid, c.name, c.generation, c.nbytes, c.runs, c.kept))


def loaded(ledger: Ledger, c: Component) -> None:
    c.state = State.RESIDENT
    c.resident_since = ledger.now
    c.swap_in_s = ledger.now - c.load_started
    ledger.holders.rank(c)
    if not c.workspace:
        c.copy_s = ledger.now - max(c.load_started, ledger.copied_at)
        ledger.copied_at = ledger.now
        c.loads += 1
        ledger.loads += 1


def load_failed(ledger: Ledger, c: Component) -> None:
    """The component is absent again, if need be once its worker has let go of the chunks."""
    c.dirty = False  # the worker's writes during the load are not worth keeping
    if c.mapped:
        return leaving.evict(ledger, c, "failed", None)
    ledger.pool.give(c.runs)
    ledger.drop_superseded(c)
    c.state = State.ABSENT
    ledger.recount(c)
    if c.unregistering:
        registry.finish_unregister(ledger, c)
