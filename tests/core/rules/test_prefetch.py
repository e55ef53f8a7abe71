"""Prefetches."""

from swapd.core.states import State
from tests.core.rules.common import mutable_pair
from tests.core.world import Make, outcome


def test_a_prefetch_is_answered_at_once_and_brings_in_what_fits(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    key = w.prefetch(s, "a")
    assert w.told() == [f"accept {key[1]}", "copy in a"]
    w.settle()
    assert "a" in w.ledger.idle
    assert w.granted(w.acquire(s, "a"))


def test_a_prefetch_makes_room_by_evicting_what_is_idle(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6)
    w.touch(s, "a")
    w.prefetch(s, "b")
    assert outcome(w)[1:] == ["evict a (room)", "revoke a", "copy in b"]


def test_nothing_goes_for_a_prefetch_of_what_leaves_after_its_use(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6, policy="sequential")
    w.touch(s, "a")
    w.prefetch(s, "b")
    w.sleep(100.0)
    assert w.evictions() == []


def test_a_prefetch_waits_for_room_and_tells_nobody_to_give_way(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6)
    held = w.use(s, "a")
    w.prefetch(s, "b")
    w.sleep(100.0)
    assert not w.wanted
    w.release(held)
    assert outcome(w)[-1] == "copy in b"


def test_a_prefetch_takes_nothing_while_somebody_waits(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for name, size in (("a", 6), ("b", 6), ("c", 2)):
        w.register(s, name, size)
    held = w.use(s, "a")
    w.acquire(t, "b")
    w.prefetch(s, "c")
    assert w.moves == {}
    w.release(held)
    assert outcome(w)[-2:] == ["copy in b", "copy in c"]


def test_a_prefetch_of_what_is_leaving_brings_it_back(make: Make) -> None:
    w, s, t = mutable_pair(make)
    key = w.acquire(t, "b")
    w.prefetch(s, "a")
    w.settle()
    w.release(key)
    assert outcome(w)[-1] == "copy in a"


def test_a_prefetch_does_not_take_the_room_that_was_made_for_another(make: Make) -> None:
    w, _, t = mutable_pair(make)
    w.register(t, "c", 10)
    w.register(t, "d", 4)
    w.prefetch(t, "c")
    w.prefetch(t, "d")
    assert w.moves == {}
    w.ack("a")
    assert outcome(w) == ["copy out a"]
    w.move("a")
    assert outcome(w) == ["copy in c"]


def test_a_prefetch_of_what_goes_holds_back_no_other(make: Make) -> None:
    w, _, t = mutable_pair(make)
    w.register(t, "c", 10)
    w.register(t, "d", 4)
    w.prefetch(t, "c")
    w.prefetch(t, "d")
    assert w.moves == {}, "the room that is coming is meant for c"
    w.unregister(t, "c")
    assert outcome(w)[-1] == "copy in d"


def test_a_prefetch_of_what_leaves_and_is_unregistered_holds_back_no_other(make: Make) -> None:
    w, s, t = mutable_pair(make)
    w.register(t, "d", 2)
    w.cancel(w.acquire(t, "b"))
    w.prefetch(s, "a")
    w.prefetch(t, "d")
    w.unregister(s, "a")
    assert outcome(w)[-1] == "copy in d"


def test_a_prefetch_that_finds_no_room_does_not_hold_up_another(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name, size in (("a", 6), ("b", 6), ("c", 2)):
        w.register(s, name, size)
    w.use(s, "a")
    w.prefetch(s, "b", "c")
    assert outcome(w)[1:] == ["copy in c"]


def test_a_prefetch_of_an_unknown_name_is_refused(make: Make) -> None:
    w = make(10)
    s = w.open()
    assert w.refusal(w.prefetch(s, "a")).code == "unknown_component"


def test_a_prefetch_of_what_is_in_does_nothing_and_of_what_goes_is_forgotten(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 8)
    w.register(t, "b", 8)
    w.use(s, "a")
    w.prefetch(s, "a", "b")
    assert w.moves == {}
    w.leave(t)
    w.leave(s)
    assert w.moves == {}


def test_one_whose_holders_keep_its_old_bytes_keeps_no_other_out(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 2)
    w.register(s, "b", 4)
    held = w.use(s, "a")
    w.renew(s, "a")
    w.prefetch(s, "a")
    w.prefetch(s, "b")
    w.settle()
    assert w.ledger.components["b"].state is State.RESIDENT
    w.release(held)
