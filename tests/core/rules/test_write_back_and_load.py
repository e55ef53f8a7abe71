"""A load that needs the chunks of a component that is written back."""

from swapd.core.actions import CopyIn, CopyOut, Evicted
from swapd.core.records import Key
from swapd.core.states import State
from tests.core.rules.common import mutable_pair
from tests.core.world import Make, World, outcome


def saving(make: Make) -> tuple[World, int, int, Key]:
    """b (6 chunks) waits for a (6 of 10 chunks), which is written back."""
    w, s, t = mutable_pair(make)
    key = w.acquire(t, "b")
    w.ack("a")
    return w, s, t, key


def test_a_load_takes_no_chunk_of_a_write_back_before_this_has_ended(make: Make) -> None:
    w, _, _, key = saving(make)
    assert w.out == [CopyOut(1, "a", 1, 6, ((0, 6),))]
    assert (w.ledger.leaving, w.ledger.pool.free) == (6, 4)
    w.move("a")
    load = CopyIn(2, "b", 2, 6, ((0, 6),), in_use=6, urgency=(0, 0, 0, 2))
    assert w.out == [Evicted("a", 1, 6, 6), load]
    assert (w.ledger.leaving, w.ledger.pool.free) == (0, 4)
    w.move("b")
    assert w.granted(key)


def test_a_write_back_that_fails_leaves_it_where_it_was(make: Make) -> None:
    w, s, t, key = saving(make)
    for _ in range(6):
        w.step(1)
    w.move("a", fail="bus")
    assert w.refusal(key).code == "device_failed"
    assert (w.state("a"), w.state("b")) == (State.RESIDENT, State.ABSENT)
    assert w.ledger.components["a"].runs == ((0, 6),)
    back = w.acquire(s, "a")
    assert w.granted(back)
    w.release(back)
    w.acquire(t, "b")
    w.settle()
    assert w.state("b") is State.RESIDENT


def test_a_session_that_goes_while_its_component_is_written_back_delays_nobody(make: Make) -> None:
    for fail in (None, "bus"):
        w, s, _, key = saving(make)
        w.leave(s, alive=True)
        assert outcome(w) == ["lost a"]
        w.move("a", fail)
        assert "drop host copy a" in w.told()
        w.move("b")
        assert w.granted(key)


def test_a_waiter_that_is_cancelled_leaves_the_write_back_to_itself(make: Make) -> None:
    w, s, _, key = saving(make)
    w.cancel(key)
    back = w.acquire(s, "a")
    w.move("a")
    assert outcome(w) == ["copy in a"]
    w.settle()
    assert w.granted(back)


def test_rivals_have_left_entirely_before_their_mate_is_loaded(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6, policy="alternating", group="g", mutable=True)
    w.register(t, "b", 6, policy="alternating", group="g")
    w.touch(s, "a")
    w.acquire(t, "b")
    w.ack("a")
    assert w.told() == ["copy out a"]
    w.move("a")
    assert outcome(w) == ["copy in b"]


def test_early_is_granted_when_the_chunks_are_free(make: Make) -> None:
    w, _, t = mutable_pair(make)
    key = w.acquire(t, "b", early=True)
    w.ack("a")
    assert w.told() == ["copy out a"]
    w.move("a")
    assert w.told() == ["evicted a", "copy in b", f"grant {key[1]}"]
