"""Chunks that a load inherits from a write-back: overwritten as soon as each is saved."""

from swapd.core.chunks import count, split
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Move


def take_chunks(ledger: Ledger, c: Component) -> Move:
    """Take free chunks; if they are too few, also inherit those that are saved first."""
    free = min(c.chunks, ledger.pool.free)
    load = Move(c, c.uid, ledger.pool.take(free, prefer=c.runs))
    short = c.chunks - free
    for generation, save in ledger.saves.items() if short else ():
        if n := min(short, count(save.runs)):
            load.inherited[generation], save.runs = split(save.runs, n)
            save.heirs.append(c.generation)
            ledger.inheritable -= n
            ledger.leaving -= n
            short -= n
        if not short:
            break
    return load


def end_move(ledger: Ledger, generation: int) -> tuple[Move, list[Component]]:
    """A copy has ended; return also the components whose chunks are now all their own.

    Chunks inherited from a write-back that has ended stay with the heirs.
    """
    move = ledger.moves.pop(generation)
    bar(ledger, move)
    heirs = heirs_of(ledger, generation, move)
    for heir in heirs:
        heir.runs += heir.inherited.pop(generation)
    on_their_own = [m.component for m in heirs if not m.inherited]
    return move, [c for c in on_their_own if ledger.is_current(c)]


def heirs_of(ledger: Ledger, generation: int, save: Move) -> list[Move]:
    """The copies in flight that have inherited from this one, and are still to be told."""
    under_way = (ledger.moves.get(heir) for heir in save.heirs)
    return [m for m in under_way if m is not None and generation in m.inherited]


def hand_back(ledger: Ledger, load: Move) -> None:
    """A load failed: the write-back gets the inherited chunks back.

    The write-back may be failing too, so no other load may inherit from it; otherwise one after the
    other would, and fail with it.
    """
    for generation, runs in load.inherited.items():
        save = ledger.moves[generation]
        bar(ledger, save)
        save.runs += runs
        if ledger.is_current(save.component):
            ledger.leaving += count(runs)
    load.inherited.clear()


def bar(ledger: Ledger, save: Move) -> None:
    if save.heritable:
        save.heritable = False
        del ledger.saves[save.component.generation]
        ledger.inheritable -= count(save.runs)
