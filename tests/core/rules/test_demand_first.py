"""Loads that an acquire waits for come before all others; nobody's memory is held by a guess."""

import pytest

from swapd.core.actions import CopyIn, Hasten
from swapd.core.states import State
from tests.core.world import Make, World, outcome


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


def order(w: World) -> list[str]:
    """The loads that have not ended, the most urgent first, as the daemon runs them."""
    ranks = {a.name: a.urgency for a in w.log if isinstance(a, CopyIn | Hasten)}
    return sorted((m.name for m in w.copies() if isinstance(m, CopyIn)), key=ranks.__getitem__)


def test_an_acquire_comes_before_all_prefetches(make: Make) -> None:
    w = make(20)
    s = w.open()
    for name in (*names(5), "asked"):
        w.register(s, name, 2)
    w.prefetch(s, *names(5))
    w.acquire(s, "asked")
    assert order(w) == ["asked", *names(5)]


def test_a_load_is_as_urgent_as_the_first_waiter_for_it(make: Make) -> None:
    w = make(20)
    s = w.open()
    for name in names(4):
        w.register(s, name, 2)
    w.acquire(s, "n0", agent=1)
    w.acquire(s, "n1", agent=2, priority=1)
    w.prefetch(s, "n2", "n3")
    assert order(w) == ["n1", "n0", "n2", "n3"]
    urgent = w.acquire(s, "n3", agent=3, priority=2)
    assert order(w) == ["n3", "n1", "n0", "n2"]
    w.cancel(urgent)
    assert order(w) == ["n1", "n0", "n2", "n3"]


def test_a_load_whose_acquire_has_timed_out_comes_last(make: Make) -> None:
    w = make(20)
    s = w.open()
    for name in names(3):
        w.register(s, name, 2)
    w.acquire(s, "n0", timeout=1.0)
    w.prefetch(s, "n1")
    w.sleep(2.0)
    w.acquire(s, "n2", agent=1)
    assert order(w) == ["n2", "n1", "n0"]
    again = w.acquire(s, "n0", agent=2)
    assert order(w) == ["n2", "n0", "n1"]
    w.move("n0")
    assert w.granted(again)


def test_a_load_of_a_session_that_is_gone_ends_early(make: Make) -> None:
    w = make(6)
    s, t = w.open(), w.open()
    w.register(s, "gone", 6)
    w.register(t, "next", 6)
    w.acquire(s, "gone")
    key = w.acquire(t, "next")
    w.leave(s)
    assert outcome(w) == ["stop gone"]
    w.settle()
    assert w.granted(key)
    assert w.bytes_in == 6, "only the second was copied whole"


@pytest.mark.parametrize("timeout", [None, 1.0], ids=["prefetch", "timed out"])
def test_the_room_of_a_load_that_nobody_waits_for_goes_to_who_asks(
    make: Make, timeout: float | None
) -> None:
    w = make(6)
    s, t = w.open(), w.open()
    w.register(s, "guess", 6)
    w.register(t, "asked", 4)
    if timeout is None:
        w.prefetch(s, "guess")
    else:
        w.acquire(s, "guess", timeout=timeout)
        w.sleep(2 * timeout)
    key = w.acquire(t, "asked")
    assert outcome(w) == ["evict guess (room)", "stop guess"]
    assert w.state("guess") is State.STOPPING
    w.move("guess")
    assert outcome(w) == ["copy in asked"]
    w.settle()
    assert w.granted(key)


def test_a_load_that_ends_while_it_is_being_stopped_leaves_all_the_same(make: Make) -> None:
    w = make(6)
    s = w.open()
    w.register(s, "guess", 6)
    w.register(s, "asked", 6)
    w.prefetch(s, "guess")
    w.acquire(s, "asked")
    guess = next(g for g, m in w.moves.items() if m.name == "guess")
    while w.step(guess):
        pass
    w.end_move(guess)
    assert outcome(w) == ["copy in asked"]


def test_who_asks_for_a_load_that_is_being_stopped_gets_it_anew(make: Make) -> None:
    w = make(6)
    s = w.open()
    w.register(s, "guess", 6)
    w.register(s, "asked", 6)
    w.prefetch(s, "guess")
    first = w.acquire(s, "asked")
    second = w.acquire(s, "guess", agent=1)
    w.settle()
    assert w.granted(first)
    w.release(first)
    w.settle()
    assert w.granted(second)


def test_a_prefetch_stops_no_load_that_another_prefetch_wants(make: Make) -> None:
    w = make(6)
    s = w.open()
    w.register(s, "one", 6)
    w.register(s, "two", 6)
    w.prefetch(s, "one")
    w.prefetch(s, "two")
    assert outcome(w) == ["accept 6"]


def test_what_is_idle_goes_before_a_load_that_a_prefetch_wants(make: Make) -> None:
    w = make(8)
    s = w.open()
    for name in ("idle", "guess", "asked"):
        w.register(s, name, 4)
    w.touch(s, "idle")
    w.prefetch(s, "guess")
    w.acquire(s, "asked")
    assert outcome(w) == ["evict idle (room)", "revoke idle", "copy in asked"]


def test_a_load_that_its_worker_has_seen_is_not_stopped(make: Make) -> None:
    """Its writes would be lost, and it might still read."""
    w = make(6)
    s, t = w.open(), w.open()
    w.register(s, "early", 6, mutable=True)
    w.register(t, "asked", 6)
    held = w.acquire(s, "early", early=True)
    w.release(held)
    key = w.acquire(t, "asked")
    assert w.state("early") is State.LOADING
    w.settle()
    assert w.granted(key)


def test_a_pin_during_a_load_that_nobody_waits_for_keeps_it(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "pinned", 5)
    w.register(s, "other", 5)
    w.prefetch(s, "pinned")
    w.pin(s, "pinned")
    w.prefetch(s, "other")
    w.acquire(s, "other")
    assert w.state("pinned") is State.LOADING
    w.settle()
    assert w.state("pinned") is State.RESIDENT


@pytest.mark.parametrize("how", ["expires", "is taken back"])
def test_a_prefetch_ends_before_there_is_room(make: Make, how: str) -> None:
    w = make(6)
    s = w.open()
    w.register(s, "held", 6)
    w.register(s, "guess", 6)
    held = w.use(s, "held")
    w.prefetch(s, "guess", timeout=5.0)
    if how == "expires":
        w.sleep(5.0)
    else:
        w.prefetch(s, "guess", timeout=0.0)
    w.release(held)
    assert outcome(w) == []
    assert w.core.next_deadline() is None


@pytest.mark.parametrize("how", ["expires", "is taken back", "is granted"])
def test_a_prefetch_of_what_is_in_while_others_wait_ends_too(make: Make, how: str) -> None:
    w = make(6)
    s = w.open()
    w.register(s, "guess", 6)
    w.register(s, "other", 6)
    held = w.use(s, "guess")
    first = w.acquire(w.open(), "other")
    w.prefetch(s, "guess", timeout=0.0 if how == "is taken back" else 5.0)
    if how == "is granted":
        again = w.acquire(s, "guess")
        w.release(again)
    w.release(held)
    w.settle()
    assert w.granted(first)
    w.sleep(5.0 if how == "expires" else 1.0)
    w.release(first)
    assert w.state("guess") is State.ABSENT
    assert w.core.next_deadline() is None


def test_a_prefetch_that_has_ended_is_loaded_after_all_others(make: Make) -> None:
    w = make(20)
    s = w.open()
    w.register(s, "first", 2)
    w.register(s, "second", 2)
    w.prefetch(s, "first", timeout=1.0)
    w.prefetch(s, "second")
    assert order(w) == ["first", "second"]
    w.sleep(1.0)
    assert order(w) == ["second", "first"]


def test_a_prefetch_named_again_lasts_as_said_last(make: Make) -> None:
    w = make(6)
    s = w.open()
    w.register(s, "held", 6)
    w.register(s, "guess", 6)
    held = w.use(s, "held")
    w.prefetch(s, "guess", timeout=1.0)
    w.prefetch(s, "guess")
    w.sleep(100.0)
    w.release(held)
    assert outcome(w)[-1] == "copy in guess"
