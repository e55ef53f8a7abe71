"""Unregistering a component, in every state."""

from swapd.core.actions import Accept
from swapd.core.states import State
from tests.core.world import Make, outcome


def test_unregister_what_is_filling(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.ask_register(s, "a")
    assert w.refusal(w.unregister(s, "a")).code == "in_use"
    w.make_masters()
    w.unregister(s, "a")
    assert w.told() == ["accept 3", "drop host copy a"]
    w.register(s, "a")


def test_unregister_what_is_absent(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a")
    w.unregister(s, "a")
    assert w.told() == ["accept 3", "drop host copy a"]


def test_unregister_what_is_loading_refuses_the_waiters_and_ends_with_the_copy(
    make: Make,
) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a")
    key = w.acquire(t, "a")
    w.unregister(s, "a")
    assert w.refusal(key).code == "component_gone"
    assert w.told()[:2] == ["evict a (unregister)", "stop a"]
    assert w.state("a") is State.STOPPING
    w.move("a")
    assert w.told() == ["evicted a", "accept 4", "drop host copy a"]


def test_unregister_what_is_loading_ends_with_a_copy_that_fails(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a")
    key = w.acquire(s, "a")
    w.unregister(s, "a")
    w.move("a", fail="bus")
    assert w.refusal(key).code == "component_gone"
    assert w.told() == ["evicted a", "accept 4", "drop host copy a"]


def test_unregister_what_is_idle(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a")
    w.touch(s, "a")
    w.unregister(s, "a")
    assert outcome(w) == ["evict a (unregister)", "revoke a", "accept 4", "drop host copy a"]


def test_unregister_what_is_leased_is_refused_and_says_by_whom(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open("other")
    w.register(s, "a")
    w.use(t, "a")
    refusal = w.refusal(w.unregister(s, "a"))
    assert refusal.code == "in_use"
    assert "leased by other (session 7002)" in refusal.message


def test_unregister_what_is_loaded_but_promised_takes_it_from_its_waiter(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a")
    w.register(s, "b")
    key = w.acquire(t, "a", "b")
    w.move("a")
    w.unregister(s, "a")
    assert w.refusal(key).code == "component_gone"
    assert "a" not in w.ledger.components
    w.move("b")
    assert "b" in w.ledger.idle


def test_unregister_what_is_being_revoked_or_written_back_ends_with_the_eviction(
    make: Make,
) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6, mutable=True)
    w.register(t, "b", 6)
    w.touch(s, "a")
    key = w.acquire(t, "b")
    assert w.state("a") is State.REVOKING
    answer = w.unregister(s, "a")
    w.ack("a")
    assert w.told() == ["copy out a"]
    assert w.state("a") is State.WRITING_BACK
    assert w.refusal(w.unregister(s, "a")).code == "in_use"
    w.move("a")
    assert w.told() == ["evicted a", f"accept {answer[1]}", "drop host copy a", "copy in b"]
    w.settle()
    assert w.granted(key)


def test_unregister_is_refused_if_the_write_back_fails_and_can_be_asked_again(
    make: Make,
) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", mutable=True)
    w.touch(s, "a")
    key = w.unregister(s, "a")
    w.ack("a")
    w.move("a", fail="bus")
    assert w.refusal(key).code == "device_failed"
    again = w.unregister(s, "a")
    w.settle()
    assert w.answers[again] == Accept(*again)


def test_unregister_is_for_the_owner(make: Make) -> None:
    w = make(10)
    s, t = w.open("one"), w.open()
    w.register(s, "a")
    refusal = w.refusal(w.unregister(t, "a"))
    assert refusal.code == "not_owner"
    assert "one (session 7001)" in refusal.message
    assert w.refusal(w.unregister(t, "b")).code == "unknown_component"


def test_unregister_parks_the_waiters_that_said_they_would_wait(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(t, "b", 6)
    held = w.use(t, "b")
    key = w.acquire(t, "a", await_registration=True, agent=1)
    w.unregister(s, "a")
    assert key not in w.answers
    w.release(held)
    w.register(s, "a", 6)
    w.settle()
    assert w.granted(key)


def test_who_waits_behind_a_waiter_that_is_parked_goes_on_at_once(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 6), (t, "big", 8), (u, "small", 3)):
        w.register(session, name, size)
    w.use(s, "a")
    w.acquire(u, "big", await_registration=True)
    w.acquire(u, "small", agent=1)
    w.unregister(t, "big")
    assert outcome(w)[-1] == "copy in small"
