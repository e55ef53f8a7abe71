"""Granting, loading, sharing."""

from swapd.core.actions import CopyIn, Evict, Evicted, Grant, SendRevoke
from swapd.core.ledger import HITS_MAX
from swapd.core.states import State
from swapd.shared.protocol import Placement
from tests.core.world import Make, outcome


def test_an_absent_component_is_loaded_and_then_granted(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    key = w.acquire(s, "a")
    assert w.out == [CopyIn(1, "a", 1, 6, ((0, 6),), in_use=6, urgency=(0, 0, 0, 1))]
    w.now = 0.5
    w.move("a")
    assert w.out == [Grant(*key, (Placement("a", 1, ((0, 6),)),), 0.5, True)]


def test_a_resident_component_is_granted_at_once(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.touch(s, "a")
    key = w.acquire(s, "a")
    assert w.out == [Grant(*key, (Placement("a", 1, ((0, 6),)),), 0.0, False)]


def test_hits_that_a_worker_tells_of_are_counted_as_far_as_can_be_said(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a")
    w.touch(s, "a")
    for again, expected in ((5, 6), (HITS_MAX, HITS_MAX), (HITS_MAX, HITS_MAX)):
        key = w.acquire(s, "a")
        w.release(key, again=again)
        assert w.ledger.components["a"].hits == expected
        assert w.ledger.hits == expected


def test_only_the_owner_is_told_where_a_component_is(make: Make) -> None:
    w = make(10)
    owner, other = w.open(), w.open()
    w.register(owner, "a")
    key = w.use(other, "a")
    assert w.answers[key] == Grant(*key, (), 0.0, True)


def test_room_is_made_evicted_and_loaded_in_one_step(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6)
    w.touch(s, "a")
    key = w.acquire(s, "b")
    assert w.out == [
        Evict("a", 1, "room", key),
        SendRevoke(s, "a", 1, False),
        Evicted("a", 1, 6, 0),
        CopyIn(2, "b", 2, 6, ((0, 6),), in_use=6, urgency=(0, 0, 0, 2)),
    ]


def test_a_component_that_comes_again_gets_the_chunks_it_had(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name, size in (("a", 3), ("b", 4), ("big", 10)):
        w.register(s, name, size)
    w.touch(s, "a")
    w.touch(s, "b")
    before = w.ledger.components["b"].runs
    w.touch(s, "big")
    w.touch(s, "b")
    assert w.ledger.components["b"].runs == before == ((3, 4),)


def test_exclusion_a_leased_component_is_not_evicted(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(t, "b", 6)
    held = w.use(s, "a")
    key = w.acquire(t, "b")
    assert w.evictions() == []
    w.release(held)
    assert outcome(w) == ["evict a (room)", "revoke a", "copy in b"]
    w.settle()
    assert w.granted(key)


def test_a_lease_held_twice_is_free_after_the_second_release(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6)
    first, second = w.use(s, "a"), w.use(s, "a")
    w.acquire(s, "b", agent=1)
    w.release(first)
    w.release(first)
    assert w.evictions() == []
    w.release(second)
    assert w.evictions() == ["a"]


def test_the_least_recently_used_goes_first(make: Make) -> None:
    w = make(3)
    s = w.open()
    for name in "abcd":
        w.register(s, name)
    for name in "abca":
        w.touch(s, name)
    for name in "dbc":
        w.touch(s, name)
    assert w.evictions() == ["b", "c", "a"]


def test_a_release_counts_as_use(make: Make) -> None:
    w = make(2)
    s = w.open()
    for name in "abc":
        w.register(s, name)
    held = w.use(s, "a")
    w.touch(s, "b")
    w.release(held)
    w.touch(s, "c")
    assert w.evictions() == ["b"]


def test_joiners_share_one_load(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a")
    keys = [w.acquire(s, "a"), w.acquire(t, "a"), w.acquire(s, "a", agent=1)]
    assert list(w.moves) == [1]
    w.move("a")
    assert w.told() == [f"grant {request}" for _, request in keys]


def test_a_waiter_that_waits_in_the_queue_shares_a_load_that_came_meanwhile(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    for session, name, size in ((s, "a", 6), (t, "big", 8), (s, "c", 2)):
        w.register(session, name, size)
    w.use(s, "a")
    w.acquire(t, "big")
    behind = w.acquire(u, "c")
    overtaking = w.acquire(s, "c")
    assert list(w.moves) == [2]
    w.move("c")
    assert w.granted(overtaking, behind)


def test_a_cancelled_waiter_never_starts_a_load(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.register(s, "b", 6)
    held = w.use(s, "a")
    key = w.acquire(s, "b", agent=1)
    w.cancel(key)
    w.release(held)
    assert outcome(w) == []
    assert w.state("b") is State.ABSENT


def test_a_load_whose_waiter_is_cancelled_ends_idle(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    key = w.acquire(s, "a")
    w.cancel(key)
    w.move("a")
    assert w.told() == []
    assert "a" in w.ledger.idle


def test_what_was_kept_for_a_cancelled_waiter_may_be_evicted(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in ("a", "b", "c"):
        w.register(s, name, 5)
    w.touch(s, "a")
    key = w.acquire(s, "a", "b")  # a is resident, and kept until b is
    w.cancel(key)
    w.settle()
    w.touch(s, "c")
    assert w.evictions() == ["a"]


def test_cancelling_what_was_granted_releases_it(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a")
    key = w.use(s, "a")
    w.cancel(key)
    assert w.core.quiet
    assert "a" in w.ledger.idle


def test_cancelling_and_releasing_what_is_not_there_does_nothing(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.cancel((s, 99))
    w.release((s, 99))
    assert w.log == []


def test_a_loaded_component_that_its_waiter_has_not_used_is_not_evicted(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for name, size in (("a", 4), ("b", 4), ("c", 6)):
        w.register(s, name, size)
    both = w.acquire(s, "a", "b")
    w.acquire(t, "c")
    w.move("a")
    assert w.evictions() == []
    w.move("b")
    assert w.granted(both)


def test_an_acquire_of_nothing_is_refused(make: Make) -> None:
    w = make(10)
    s = w.open()
    assert "name at least one" in w.refusal(w.acquire(s)).message


def test_a_name_asked_twice_in_one_acquire_counts_once(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    key = w.use(s, "a", "a")
    w.release(key)
    assert "a" in w.ledger.idle
