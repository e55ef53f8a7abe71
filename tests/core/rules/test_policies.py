"""Policies of components."""

from swapd.core.states import State
from tests.core.world import Make, outcome


def test_alternating_a_in_means_b_out(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in "abc":
        w.register(s, name, policy="alternating", group="g")
    w.touch(s, "a")
    w.acquire(s, "b")
    assert outcome(w) == ["evict a (alternating)", "revoke a", "copy in b"]
    w.settle()
    assert [n for n in "abc" if w.ledger.components[n].on_device] == ["b"]


def test_alternating_waits_for_its_rival_though_there_is_room(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", policy="alternating", group="g")
    w.register(t, "b", policy="alternating", group="g")
    w.register(t, "other", policy="alternating", group="h")
    held, beside = w.use(s, "a"), w.use(t, "other")
    key = w.acquire(t, "b", agent=1)
    assert w.moves == {}
    w.release(held)
    w.settle()
    assert w.granted(key, beside)


def test_alternating_waits_for_a_rival_that_is_still_leaving(make: Make) -> None:
    w = make(10, strict=True)
    s, t = w.open(), w.open()
    w.register(s, "a", policy="alternating", group="g")
    w.register(t, "b", policy="alternating", group="g")
    w.touch(s, "a")
    w.acquire(t, "b")
    assert outcome(w) == ["evict a (alternating)", "revoke a (ack)"]
    w.ack("a")
    assert outcome(w) == ["copy in b"]


def test_alternating_members_asked_at_once_are_refused(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", policy="alternating", group="g")
    w.register(s, "b", policy="alternating", group="g")
    refusal = w.refusal(w.acquire(s, "a", "b"))
    assert refusal.code == "conflict"
    assert "a (group g) and b (group g) exclude each other" in refusal.message


def test_alternating_evicts_no_rival_unless_all_the_room_is_there(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 2, policy="alternating", group="g")
    w.register(s, "b", 6, policy="alternating", group="g")
    w.register(t, "x", 6)
    w.touch(s, "a")
    w.use(t, "x")
    w.acquire(s, "b")
    assert w.evictions() == []


def test_alternating_a_member_that_is_unregistered_excludes_nobody(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in "ab":
        w.register(s, name, policy="alternating", group="g")
    w.touch(s, "a")
    w.unregister(s, "a")
    w.acquire(s, "b")
    assert outcome(w) == ["copy in b"]
    w.settle()
    w.leave(s)
    assert w.ledger.groups_in == {}


def test_sequential_is_dropped_when_released(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", policy="sequential")
    first, second = w.use(s, "a"), w.use(s, "a")
    w.release(first)
    assert w.told() == []
    w.release(second)
    assert outcome(w) == ["evict a (sequential)", "revoke a"]


def test_sequential_stays_while_a_queued_waiter_names_it(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    w.register(s, "a", 2, policy="sequential")
    w.register(t, "b", 6)
    w.register(u, "c", 6)
    held = w.use(s, "a")
    beside = w.use(t, "b")
    both = w.acquire(u, "a", "c")
    w.release(held)
    assert w.evictions() == []
    w.release(beside)
    w.settle()
    w.release(both)
    assert w.evictions() == ["b", "a"]


def test_sequential_is_dropped_when_the_waiter_it_stayed_for_goes(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    w.register(s, "a", 2, policy="sequential")
    w.register(t, "b", 6)
    w.register(u, "c", 6)
    held = w.use(s, "a")
    w.use(t, "b")
    both = w.acquire(u, "a", "c")
    w.release(held)
    w.cancel(both)
    assert w.evictions() == ["a"]


def test_sequential_that_was_brought_in_but_not_used_stays(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", policy="sequential")
    w.cancel(w.acquire(s, "a"))
    w.move("a")
    assert "a" in w.ledger.idle


def test_permanent_is_never_evicted(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "r", 2, policy="permanent")
    for name in "abc":
        w.register(s, name, 4)
    w.touch(s, "r")
    for name in "abcabc":
        w.touch(s, name)
    assert "r" not in w.evictions()
    assert w.state("r") is State.RESIDENT
