"""Deadlocks are refused, and nothing else is."""

import pytest

from swapd.core import deadlock
from tests.core.world import Make, outcome


def test_two_agents_that_hold_what_the_other_needs_the_newer_is_refused(make: Make) -> None:
    w = make(10)
    s, t = w.open("one"), w.open("two")
    for session, name in ((s, "a"), (t, "b"), (s, "a2"), (t, "b2")):
        w.register(session, name, 5)
    held_s, held_t = w.use(s, "a"), w.use(t, "b")
    first = w.acquire(s, "a2")
    second = w.acquire(t, "b2")
    refusal = w.refusal(second)
    assert refusal.code == "deadlock"
    assert "one (session 7001) waits for a2, holding components that this needs" in refusal.message
    assert first not in w.answers
    w.release(held_t)
    w.settle()
    assert w.granted(first, held_s)


def test_three_agents_in_a_circle_one_is_refused_and_the_others_finish(make: Make) -> None:
    w = make(9)
    sessions = [w.open() for _ in range(3)]
    held = []
    for i, s in enumerate(sessions):
        w.register(s, f"a{i}", 3)
        w.register(s, f"b{i}", 3)
        held.append(w.use(s, f"a{i}"))
    keys = [w.acquire(s, f"b{i}") for i, s in enumerate(sessions)]
    assert w.refusal(keys[2]).code == "deadlock"
    w.release(held[2])
    w.settle()
    assert w.granted(keys[0])
    w.release(keys[0])
    w.release(held[0])
    w.settle()
    assert w.granted(keys[1])


def test_an_agent_that_holds_what_it_needs_gone_is_refused(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6)
    w.use(s, "a")
    refusal = w.refusal(w.acquire(s, "b"))
    assert refusal.code == "deadlock"
    assert "its own thread holds components that it needs" in refusal.message


def test_an_agent_that_holds_a_rival_of_what_it_asks_is_refused(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", policy="alternating", group="g")
    w.register(s, "b", policy="alternating", group="g")
    w.use(s, "a")
    assert w.refusal(w.acquire(s, "b")).code == "deadlock"


def test_another_thread_of_the_same_session_is_no_deadlock(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6)
    held = w.use(s, "a", agent=1)
    key = w.acquire(s, "b", agent=2)
    assert key not in w.answers
    w.release(held)
    w.settle()
    assert w.granted(key)


def test_an_agent_that_released_in_time_is_no_deadlock(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for session, name in ((s, "a"), (t, "b"), (s, "a2")):
        w.register(session, name, 5)
    held, beside = w.use(s, "a"), w.use(t, "b")
    key = w.acquire(s, "a2")
    assert key not in w.answers, "t holds, but does not wait"
    w.release(beside)
    w.settle()
    assert w.granted(key, held)


def test_a_holder_overtakes_a_head_that_waits_for_what_it_holds(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for session, name, size in ((s, "a", 6), (s, "a2", 2), (t, "big", 8)):
        w.register(session, name, size)
    held = w.use(s, "a")
    big = w.acquire(t, "big")
    more = w.acquire(s, "a2")
    assert outcome(w)[0] == "copy in a2"
    w.settle()
    w.release(more)
    w.release(held)
    w.settle()
    assert w.granted(big)


def test_a_holder_may_use_what_is_wanted_for_another(make: Make) -> None:
    """Otherwise it could not finish, and so not release."""
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 5), (t, "b", 5), (u, "big", 10)):
        w.register(session, name, size)
    held_a, held_b = w.use(s, "a"), w.use(t, "b")
    big = w.acquire(u, "big")
    also = w.acquire(s, "b")
    assert w.granted(also)
    for key in (held_a, held_b, also):
        w.release(key)
    w.settle()
    assert w.granted(big)


def test_who_holds_nothing_that_the_head_needs_waits_its_turn(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    w.register(s, "r", 1, policy="permanent")
    for session, name, size in ((t, "a", 6), (u, "big", 8), (s, "c", 2)):
        w.register(session, name, size)
    w.use(s, "r")
    held = w.use(t, "a")
    big = w.acquire(u, "big")
    behind = w.acquire(s, "c")
    assert w.told() == [f"waiting {behind[1]}"]
    w.release(held)
    w.settle()
    assert w.granted(big)
    w.release(big)
    w.settle()
    assert w.granted(behind)


def test_two_that_always_hold_something_do_not_starve_the_head(make: Make) -> None:
    """They take turns, and the next one takes its turn before the last has released."""
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "mine", 1), (t, "yours", 1), (s, "x", 4), (t, "y", 4)):
        w.register(session, name, size)
    w.register(u, "big", 8)
    w.use(s, "mine")
    w.use(t, "yours")
    turn = w.use(s, "x")
    big = w.acquire(u, "big")
    other = w.acquire(t, "y")
    w.settle()
    assert not w.granted(other)
    w.release(turn)
    w.settle()
    assert w.granted(big)


def test_of_two_holders_that_could_help_the_head_one_overtakes(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 4), (t, "b", 4), (s, "a2", 2), (t, "b2", 2)):
        w.register(session, name, size)
    w.register(u, "big", 6)
    w.use(s, "a")
    held_b = w.use(t, "b")
    big = w.acquire(u, "big")
    older = w.acquire(t, "b2")
    assert outcome(w) == [], "who holds a does not wait: it will release"
    newer = w.acquire(s, "a2")
    assert outcome(w) == ["copy in b2"]
    w.settle()
    w.release(older)
    w.release(held_b)
    w.settle()
    assert w.granted(big)
    w.release(big)
    w.settle()
    assert w.granted(newer)


def test_a_holder_overtakes_who_waits_for_what_the_head_needs(make: Make) -> None:
    """The head needs a, whose holder needs b, whose holder only needs a grant."""
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 4), (t, "b", 4), (s, "a2", 4), (t, "b2", 2)):
        w.register(session, name, size)
    w.register(u, "big", 10)
    held_a, held_b = w.use(s, "a"), w.use(t, "b")
    big = w.acquire(u, "big")
    more_a = w.acquire(s, "a2")
    more_b = w.acquire(t, "b2")
    assert outcome(w) == ["copy in b2"]
    w.settle()
    w.release(more_b)
    w.release(held_b)
    w.settle()
    assert w.granted(more_a)
    w.release(more_a)
    w.release(held_a)
    w.settle()
    assert w.granted(big)


def test_what_many_waiting_tasks_hold_counts_once_and_is_not_searched_for_deadlocks(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Added up for each of them, it was more than the device has, and each acquire searched."""
    w = make(10)
    s, t = w.open(), w.open()
    for name, chunks in (("a", 1), ("c", 5)):
        w.register(s, name, chunks)
    w.register(t, "b", 5)
    held = w.use(t, "b")
    for agent in range(20):
        w.use(s, "a", agent=agent)
    monkeypatch.setattr(deadlock, "stuck", None)
    asked = [w.acquire(s, "c", agent=agent) for agent in range(20)]
    w.release(held)
    w.settle()
    assert w.granted(*asked)
