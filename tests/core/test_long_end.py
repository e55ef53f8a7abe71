"""A session that has much ends in steps: each of them leaves a consistent core."""

from collections.abc import Callable

import pytest

from swapd.core import events
from swapd.core.actions import MakeHostCopy, Refuse
from swapd.core.states import State
from swapd.shared.protocol import Acquire, Register
from tests.core.check import check
from tests.core.world import World, remains

#: A world, and the session in it that owns and holds much.
Made = tuple[World, int]


def much() -> Made:
    """One session owns nearly all, holds, and waits; others hold and wait for its components."""
    w = World(12)
    s, t, u = w.open(), w.open(), w.open()
    for i in range(6):
        w.register(s, f"c{i}", 2, mutable=i % 2 == 1)
        w.register(s, f"f/{i}", 1, part_of="f")
    w.register(t, "theirs", 2)
    w.use(s, "c0", "c1")
    w.use(s, "theirs")
    for _ in range(3):
        w.use(t, "c2", agent=1)
        w.acquire(s, "c5", agent=9)
        w.acquire(u, "c3", "c4", "c5")
        w.acquire(u, "f", await_registration=True)
    return w, s


def end(w: World, session: int, most: int, alive: bool) -> int:
    """End it in steps; return their number. The world's own records stop here."""
    steps = 0
    while w.core.has_more(session, most):
        w.core.handle(events.SessionEnds(w.now, session, most, alive))
        check(w.core)
        steps += 1
        assert steps < 200, "it never ends"
    return steps


def left(w: World) -> tuple[object, ...]:
    """The state when all copies have ended.

    In either case the core refuses or parks a vain waiter, unless it was granted before.
    """
    ledger = w.ledger
    while ledger.moves:
        generation, move = next(iter(ledger.moves.items()))
        saves = move.component.state is State.WRITING_BACK
        w.core.handle((events.CopiedOut if saves else events.CopiedIn)(w.now, generation))
    assert not w.core.ledger.queue.queued
    return (
        {name: (c.state, len(c.leases)) for name, c in ledger.components.items()},
        set(ledger.leases),
        ledger.pool.free,
        ledger.host.owners.keys() - ledger.host.making,
        sorted(ledger.quarantined),
    )


@pytest.mark.parametrize("alive", [False, True])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_the_end_of_much_leaves_what_one_step_would(most: int, alive: bool) -> None:
    (slow, s), (quick, _) = much(), much()
    assert end(slow, s, most, alive) > 1
    for w in (slow, quick):
        w.core.handle(events.SessionGone(w.now, s, alive))
        check(w.core)
        assert remains(w.core, s) == []
    assert left(slow) == left(quick)


@pytest.mark.parametrize("make", [much])
def test_no_step_ends_more_than_it_may(make: Callable[[], Made]) -> None:
    w, s = make()
    while w.core.has_more(s, 2):
        before = size(w, s)
        done = w.core.handle(events.SessionEnds(w.now, s, 2))
        refused = [a for a in done if isinstance(a, Refuse)]
        assert 0 < before - size(w, s) + len(refused) <= 4
    assert size(w, s) <= 2


def size(w: World, session: int) -> int:
    known = w.ledger.sessions[session]
    return len(known.waiters) + len(known.leases) + len(known.owns)


def test_others_are_served_between_two_steps() -> None:
    w, s = much()
    t = w.open()
    w.core.handle(events.SessionEnds(w.now, s, 1))
    done = w.core.handle(events.SessionRequest(w.now, t, Register(10_001, "new", 1)))
    assert [a.name for a in done if isinstance(a, MakeHostCopy)] == ["new"]


def test_what_is_about_to_go_can_be_acquired_no_more() -> None:
    w = World(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(t, "b", 6)
    w.use(t, "b")
    for _ in range(3):
        w.acquire(t, "a", agent=1)
    w.core.handle(events.SessionEnds(w.now, s, 1))
    assert "a" in w.ledger.components
    done = w.core.handle(events.SessionRequest(w.now, t, Acquire(10_002, ("a",), 2)))
    assert [a.code for a in done if isinstance(a, Refuse)] == ["unknown_component"]


def test_several_updates_that_fail_between_two_steps_are_given_up() -> None:
    """A worker that still maps a new host copy for writing may end before the seal fails."""
    w = World(12)
    s = w.open()
    for name in "ab":
        w.register(s, name, 2)
    for name in "ab":
        w.update(s, name)
    w.make_masters()
    w.commit(s, "a", "b")
    w.core.handle(events.SessionEnds(w.now, s, 1))
    for uid in list(w.making):
        w.core.handle(events.HostCopyFailed(w.now, uid, "bad_request", "still mapped"))
        check(w.core)
    w.core.handle(events.SessionGone(w.now, s))
    check(w.core)
    assert remains(w.core, s) == []
    assert not w.ledger.host.owners
