"""The order in which waiters are granted."""

from swapd.core.actions import Waiting
from swapd.core.records import Key
from swapd.core.states import State
from tests.core.rules.common import blocked
from tests.core.world import Make, World, outcome


def drain(w: World, held: Key, keys: list[Key]) -> list[Key]:
    """Release, then release each granted lease in turn; return the order of the grants."""
    order = []
    w.release(held)
    w.settle()
    while got := [key for key in keys if w.granted(key)]:
        order += got
        w.release(got[0])
        w.settle()
    return order


def test_first_come_first_served(make: Make) -> None:
    w, held, others = blocked(make)
    keys = [w.acquire(s, f"c{i}") for i, s in enumerate(others)]
    assert drain(w, held, keys) == keys


def test_a_waiter_is_not_overtaken_by_one_that_would_fit(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 6), (t, "big", 8), (u, "small", 3)):
        w.register(session, name, size)
    w.use(s, "a")
    w.acquire(t, "big")
    w.acquire(u, "small")
    assert outcome(w) == []
    assert w.state("small") is State.ABSENT


def test_higher_priority_goes_first(make: Make) -> None:
    w, held, others = blocked(make)
    low, mid, high = (w.acquire(s, f"c{i}", priority=i) for i, s in enumerate(others))
    assert drain(w, held, [low, mid, high]) == [high, mid, low]


def test_the_oldest_goes_first_when_its_patience_is_over(make: Make) -> None:
    w, held, others = blocked(make, patience_s=5.0)
    low = w.acquire(others[0], "c0")
    w.sleep(4.0)
    high = w.acquire(others[1], "c1", priority=9)
    w.sleep(1.0)
    assert drain(w, held, [low, high]) == [low, high]


def test_several_are_acquired_all_or_none(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for session, name, size in ((s, "a", 6), (t, "b", 2), (t, "c", 6)):
        w.register(session, name, size)
    held = w.use(s, "a")
    both = w.acquire(t, "b", "c")
    assert w.state("b") is State.ABSENT, "nothing is taken before all can be"
    w.release(held)
    assert outcome(w) == ["evict a (room)", "revoke a", "copy in b", "copy in c"]
    w.move("c")
    assert not w.granted(both)
    w.move("b")
    assert w.granted(both)


def test_who_waits_is_on_record_once_with_who_holds_what(make: Make) -> None:
    w, _, others = blocked(make)
    w.ledger.sessions[7001].label = "vllm-0"
    key = w.acquire(others[0], "c0")
    record = w.out[0]
    assert isinstance(record, Waiting)
    assert (record.session, record.request, record.names) == (*key, ("c0",))
    assert record.why == "needs 10 B, free 0 B; held: held (10 B) by vllm-0 (session 7001)"
    w.sleep(100.0)
    assert [a for a in w.log if isinstance(a, Waiting)] == [record]


def test_a_head_that_goes_lets_the_next_one_in(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 6), (t, "big", 8), (u, "small", 3)):
        w.register(session, name, size)
    w.use(s, "a")
    big = w.acquire(t, "big")
    w.acquire(u, "small")
    w.cancel(big)
    assert outcome(w) == ["copy in small"]
