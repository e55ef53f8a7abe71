"""New bytes for components: a second host copy beside the first, which takes its place."""

from swapd.core import registry, transfers
from swapd.core.ledger import Ledger
from swapd.core.records import Component, Move, Renewal
from swapd.core.states import State


def begin(ledger: Ledger, c: Component, request: int) -> None:
    """Order a second host copy. The bytes on the device, and in the first one, stay."""
    c.renewal = Renewal(ledger.next_uid(), request, request)
    registry.make_master(ledger, c, c.renewal.uid, request)


def answer(ledger: Ledger, c: Component, renewal: Renewal) -> None:
    assert renewal.request is not None
    ledger.accept((c.session, renewal.request))
    renewal.request = None


def _give_up(ledger: Ledger, c: Component, renewal: Renewal) -> None:
    c.renewal = None
    registry.drop_master(ledger, renewal.uid)


def give_up(ledger: Ledger, c: Component, renewal: Renewal) -> None:
    """Drop this new host copy, and those that were to take effect with it."""
    for one in renewal.together or (c,):
        assert one.renewal is not None
        _give_up(ledger, one, one.renewal)


def seal_together(ledger: Ledger, parts: tuple[Component, ...], request: int) -> None:
    """Their new host copies are filled: order their sealing, and answer when all are sealed."""
    for c in parts:
        assert c.renewal is not None
        c.renewal.request, c.renewal.together = request, parts
        registry.seal(ledger, c, c.renewal.uid)


def sealed(ledger: Ledger, c: Component, renewal: Renewal) -> None:
    """If all that take effect together are sealed, they do so in this one step."""
    renewal.sealed = True
    renewals = [one.renewal for one in renewal.together]
    if all(r is not None and r.sealed for r in renewals):
        assert renewal.request is not None
        ledger.accept((c.session, renewal.request))
        for one in renewal.together:
            assert one.renewal is not None
            _renew(ledger, one, one.renewal)


def _renew(ledger: Ledger, c: Component, renewal: Renewal) -> None:
    """The new host copy takes the place of the old one.

    The bytes on the device, or on their way there, are superseded: they go when the last holder
    releases them.
    """
    old, c.uid, c.renewal = c.uid, renewal.uid, None
    c.updated_by = renewal.begun_by
    move = ledger.moves.get(c.generation)
    if not (move and move.uid == old):
        registry.drop_master(ledger, old)
    if c.state in (State.LOADING, State.RESIDENT):
        with ledger.holders.reclassified(c):
            c.superseded = True
        ledger.superseded[c.name] = c
        transfers.settle(ledger, c)
        ledger.room_shrank = True  # its holders are in the way of its waiters
    ledger.replan = True


def end_copy_of(ledger: Ledger, move: Move) -> None:
    """Drop the host copy that was kept for this copy, if the component has another by now."""
    if move.uid != move.component.uid:
        registry.drop_master(ledger, move.uid)
