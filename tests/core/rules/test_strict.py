"""Workers acknowledge before chunks are reused."""

from swapd.core.actions import Fence
from swapd.core.events import RevokeAck, Tick
from swapd.core.states import State
from tests.core.rules.common import strict_pair
from tests.core.world import Make, outcome


def test_strict_reuses_no_chunk_before_the_acknowledgement(make: Make) -> None:
    w, _, t = strict_pair(make)
    key = w.acquire(t, "b")
    assert outcome(w) == ["evict a (room)", "revoke a (ack)"]
    assert w.state("a") is State.REVOKING
    w.ack("a")
    assert w.told() == ["evicted a", "copy in b"]
    w.settle()
    assert w.granted(key)


def test_strict_does_not_wait_for_who_was_never_told_where_it_is(make: Make) -> None:
    w = make(10, strict=True)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    w.register(t, "b", 6)
    w.touch(t, "a")
    w.acquire(t, "b")
    assert outcome(w) == ["evict a (room)", "copy in b"]


def test_a_worker_that_does_not_acknowledge_is_fenced(make: Make) -> None:
    w, s, t = strict_pair(make, ack_timeout_s=2.0)
    key = w.acquire(t, "b")
    w.sleep(1.9)
    assert not w.fenced
    (fence,) = w.sleep(0.1)
    assert isinstance(fence, Fence)
    assert fence.session == s
    assert "no acknowledgement within 2 s that 'a' is unmapped" in fence.why
    w.sleep(10.0)
    assert w.fenced == [s]
    w.leave(s)
    w.settle()
    assert w.granted(key)


def test_a_worker_is_fenced_once(make: Make) -> None:
    w = make(10, strict=True, ack_timeout_s=2.0)
    s, t = w.open(), w.open()
    for name in "ab":
        w.register(s, name, 5)
        w.touch(s, name)
    w.register(t, "c", 10)
    w.acquire(t, "c")
    w.sleep(10.0)
    assert w.fenced == [s]


def test_an_acknowledgement_that_is_stale_or_false_is_ignored(make: Make) -> None:
    w, s, t = strict_pair(make)
    w.acquire(t, "b")
    (generation,) = w.acks
    for false in (
        RevokeAck(0.0, s, "a", generation - 1),
        RevokeAck(0.0, t, "a", generation),
        RevokeAck(0.0, s, "a", generation + 1),
    ):
        w.send(false)
        assert w.out == []
    assert w.state("a") is State.REVOKING
    w.ack("a")
    w.send(RevokeAck(0.0, s, "a", generation))
    assert w.out == []


def test_one_more_eviction_is_not_ordered_while_enough_is_leaving(make: Make) -> None:
    w = make(10, strict=True)
    s, t = w.open(), w.open()
    w.register(s, "a", 5)
    w.register(s, "b", 5)
    w.register(t, "c", 5)
    w.touch(s, "a")
    w.touch(s, "b")
    w.acquire(t, "c")
    w.send(Tick(0.0))
    assert w.evictions() == ["a"]
