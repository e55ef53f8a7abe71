"""Grants before the copies have ended."""

from swapd.core.actions import CopyIn, Grant, SendBroken
from swapd.core.states import State
from swapd.shared.protocol import Placement
from tests.core.world import Make, World, outcome


def test_early_is_granted_as_soon_as_the_copies_are_ordered(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    key = w.acquire(s, "a", early=True)
    assert w.out == [
        CopyIn(1, "a", 1, 6, ((0, 6),), in_use=6, urgency=(0, 0, 0, 1)),
        Grant(*key, (Placement("a", 1, ((0, 6),)),), 0.0, True),
    ]
    w.move("a")
    assert w.out == []
    w.release(key)
    assert "a" in w.ledger.idle


def test_early_waits_for_what_another_session_owns(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "mine", 3)
    w.register(t, "theirs", 3)
    key = w.acquire(s, "mine", "theirs", early=True)
    assert w.told() == ["copy in mine", "copy in theirs"]
    w.move("theirs")
    assert w.told() == [f"grant {key[1]}"]
    assert w.state("mine") is State.LOADING


def test_early_joins_a_load_in_flight(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a")
    first = w.acquire(t, "a", early=True)
    second = w.acquire(s, "a")
    third = w.acquire(s, "a", early=True)
    assert w.told() == [f"grant {third[1]}"]
    assert not w.granted(first)
    assert not w.granted(second)
    w.move("a")
    assert w.granted(first, second, third)


def test_early_with_no_time_to_wait_joins_no_load(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a")
    assert w.refusal(w.acquire(s, "a", early=True, timeout=0.0)).code == "timeout"
    w.acquire(s, "a")
    assert w.refusal(w.acquire(s, "a", early=True, timeout=0.0)).code == "timeout"


def test_a_lease_released_while_it_loads_ends_and_the_copy_stays_useful(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(t, "b", 6)
    w.release(w.acquire(s, "a", early=True))
    assert w.told() == []
    key = w.acquire(t, "b")
    assert w.evictions() == [], "it is being copied"
    w.move("a")
    assert outcome(w) == ["evict a (room)", "revoke a", "copy in b"]
    w.settle()
    assert w.granted(key)


def test_a_sequential_one_released_while_it_loads_is_dropped_when_it_is_in(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", policy="sequential")
    w.cancel(w.acquire(s, "a", early=True))
    assert w.told() == []
    w.move("a")
    assert outcome(w) == ["evict a (sequential)", "revoke a"]


def test_if_a_load_fails_those_let_in_early_are_told_and_keep_the_rest(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 2)
    w.use(s, "b")
    both = w.acquire(s, "a", "b", early=True)
    again = w.acquire(s, "a", early=True)
    waiter = w.acquire(t, "a")
    w.move("a", fail="bus")
    broken = w.out[0]
    assert isinstance(broken, SendBroken)
    assert (broken.session, broken.name, broken.generation) == (s, "a", 2)
    assert "(bus), and it did not reach the device: it is still in host memory" in broken.why
    assert w.told() == [
        "broken a",
        "evict a (failed)",
        "revoke a",
        "evicted a",
        f"refuse {waiter[1]} device_failed",
    ]
    assert w.leases[both] == {"b"}
    assert w.state("a") is State.ABSENT
    assert w.ledger.pool.free == 8
    assert w.granted(w.acquire(s, "a", early=True)), "it may be tried again"
    w.release(both)
    w.release(again)
    w.move("a")
    assert "a" not in w.ledger.idle


def test_if_a_load_fails_its_chunks_are_reused_when_who_knew_them_let_go(make: Make) -> None:
    for strict in (False, True):
        reused_once_acknowledged(make(10, strict=strict), mutable=not strict)


def reused_once_acknowledged(w: World, mutable: bool) -> None:
    s, t = w.open(), w.open()
    w.register(s, "a", 6, mutable=mutable)
    w.register(t, "b", 6)
    w.release(w.acquire(s, "a", early=True))
    key = w.acquire(t, "b")
    w.move("a", fail="bus")
    assert outcome(w) == ["evict a (failed)", "revoke a (ack)"], "nobody holds it any more"
    w.ack("a")
    assert w.told() == ["evicted a", "copy in b"], "there is nothing to write back"
    w.settle()
    assert w.granted(key)


def test_unregister_of_what_is_held_early_is_refused_until_it_is_released(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a")
    key = w.acquire(s, "a", early=True)
    assert w.refusal(w.unregister(s, "a")).code == "in_use"
    w.release(key)
    answer = w.unregister(s, "a")
    w.move("a", fail="bus")
    assert outcome(w) == [
        "evict a (failed)",
        "revoke a",
        f"accept {answer[1]}",
        "drop host copy a",
    ]


def test_a_holder_is_not_asked_to_give_way_before_the_copy_has_ended(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 8)
    w.register(t, "b", 8)
    w.touch(s, "a")
    w.touch(t, "b")
    w.acquire(s, "a", early=True)
    w.acquire(t, "b")
    w.sleep(10.0)
    assert not w.wanted
    w.move("a")
    w.sleep(10.0)
    assert w.wanted == {(s, "a")}


def test_of_two_holders_the_one_whose_copy_has_ended_is_asked_to_give_way(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name in ((s, "a"), (t, "b"), (u, "c")):
        w.register(session, name, 5)
    w.touch(s, "a")
    w.sleep(1.0)
    w.use(t, "b")
    w.touch(u, "c")
    w.acquire(s, "a", early=True)
    w.acquire(u, "c")
    assert w.wanted == {(t, "b")}


def test_gone_while_it_held_what_was_loading(make: Make) -> None:
    for fail in (None, "bus"):
        w = make(10)
        s, t = w.open(), w.open()
        w.register(s, "a", 6, mutable=True)
        w.register(t, "b", 6)
        w.acquire(s, "a", early=True)
        w.acquire(t, "b")
        w.leave(s)
        assert outcome(w) == ["lost a", "stop a"]
        w.move("a", fail=fail)
        assert w.told() == ["drop host copy a", "copy in b"]


def test_gone_while_it_held_what_was_loading_and_may_still_write_there(make: Make) -> None:
    for fail in (None, "bus"):
        w = make(10)
        s, t = w.open(), w.open()
        w.register(s, "a", 6, mutable=True)
        w.register(t, "b", 6)
        w.acquire(s, "a", early=True)
        key = w.acquire(t, "b")
        w.leave(s, alive=True)
        w.move("a", fail=fail)
        assert w.refusal(key).code == "too_large"
        assert w.ledger.pool.free == 4
        w.exit(s)
        assert w.ledger.pool.free == 10


def test_gone_while_it_held_what_was_loading_and_its_process_ends_first(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6, mutable=True)
    w.register(t, "b", 6)
    w.acquire(s, "a", early=True)
    key = w.acquire(t, "b")
    w.leave(s, alive=True)
    assert s in w.ledger.quarantined, "its end is to be waited for"
    w.exit(s)
    assert outcome(w) == [], "the copy is still under way"
    w.move("a")
    w.settle()
    assert w.granted(key)


def test_two_that_hold_early_and_need_the_other_gone_are_a_deadlock(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for session, name in ((s, "a"), (t, "b"), (s, "a2"), (t, "b2")):
        w.register(session, name, 5)
    w.acquire(s, "a", early=True)
    held = w.acquire(t, "b", early=True)
    first = w.acquire(s, "a2", early=True)
    assert w.refusal(w.acquire(t, "b2", early=True)).code == "deadlock"
    w.release(held)
    w.move("b")
    assert w.granted(first)
