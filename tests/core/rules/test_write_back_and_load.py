"""A load that follows a write-back, chunk by chunk."""

from swapd.core.actions import Accept, CopyIn, CopyOut, Evicted, Lost
from swapd.core.records import Key, State
from tests.core.rules.common import mutable_pair
from tests.core.world import Make, World, outcome


def saved_and_inherited(make: Make) -> tuple[World, int, int, Key]:
    """The load of b (6 chunks, 4 of them free) follows the save of a (6 chunks)."""
    w, s, t = mutable_pair(make)
    key = w.acquire(t, "b")
    w.ack("a")
    return w, s, t, key


def test_a_load_takes_what_is_free_and_then_what_is_saved_first(make: Make) -> None:
    w, _, _, key = saved_and_inherited(make)
    assert w.out == [
        CopyOut(1, "a", 1, 6, ((0, 6),)),
        CopyIn(2, "b", 2, 6, ((6, 4), (0, 2)), behind=(1,)),
    ]
    assert (w.ledger.leaving, w.ledger.inheritable, w.ledger.pool.free) == (4, 4, 0)
    w.move("a")
    assert w.out == [Evicted("a", 1, 6, 6)]
    assert (w.ledger.leaving, w.ledger.inheritable, w.ledger.pool.free) == (0, 0, 4)
    w.move("b")
    assert w.granted(key)


def test_a_load_may_end_before_what_it_inherited_from_is_saved_to_the_end(make: Make) -> None:
    w, s, t, key = saved_and_inherited(make)
    w.move("b")
    assert w.granted(key)
    w.release(key)
    assert w.state("a") is State.WRITING_BACK
    w.unregister(t, "b")
    assert w.ledger.pool.free == 6, "its chunks were its own for good"
    w.move("a")
    assert w.ledger.pool.free == 10
    assert w.granted(w.use(s, "a"))


def test_one_load_inherits_from_several(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    for name in ("a", "b", "c"):
        w.register(s, name, 3, mutable=True)
        w.touch(s, name)
    w.register(t, "big", 9)
    w.acquire(t, "big")
    for name in ("b", "a", "c"):
        w.ack(name)
    assert w.told() == ["copy out c", "copy in big"]
    (order,) = [m for m in w.moves.values() if isinstance(m, CopyIn)]
    assert (order.runs, order.behind) == (((9, 1), (3, 3), (0, 3), (6, 2)), (2, 1, 3))
    w.settle()
    assert w.core.quiet is False
    assert w.state("big") is State.RESIDENT


def test_several_loads_inherit_from_one(make: Make) -> None:
    w = make(10)
    s, t, u = w.open(), w.open(), w.open()
    w.register(s, "a", 9, mutable=True)
    for session, name in ((t, "b"), (u, "c")):
        w.register(session, name, 4)
    w.touch(s, "a")
    keys = [w.acquire(t, "b"), w.acquire(u, "c")]
    w.ack("a")
    b, c = (m for m in w.moves.values() if isinstance(m, CopyIn))
    assert (b.runs, c.runs) == (((9, 1), (0, 3)), ((3, 4),))
    w.move("c")
    w.move("b", fail="bus")
    assert (w.refusal(keys[0]).code, w.granted(keys[1])) == ("device_failed", True)
    assert w.ledger.leaving == 5, "what b inherited is to be saved as if it had not"
    w.move("a")
    assert w.ledger.pool.free == 6


def test_after_a_load_that_failed_nobody_inherits_from_what_it_was_behind(make: Make) -> None:
    """The save may be failing as well: each later load would fail with it."""
    w, _, t, key = saved_and_inherited(make)
    second = w.acquire(t, "b", agent=1)
    w.move("b", fail="bus")
    assert w.refusal(key).code == w.refusal(second).code == "device_failed"
    third = w.acquire(t, "b", agent=2)
    assert outcome(w) == [], "enough is leaving"
    w.move("a")
    assert outcome(w) == ["copy in b"]
    w.settle()
    assert w.granted(third)


def test_if_the_save_fails_its_heirs_fail_first_and_it_is_where_it_was(make: Make) -> None:
    w, s, t, key = saved_and_inherited(make)
    for _ in range(6):
        w.step(1)
        w.step(2)
    w.move("a", fail="bus")
    assert w.refusal(key).code == "device_failed"
    assert w.told() == []
    assert (w.state("a"), w.state("b")) == (State.RESIDENT, State.ABSENT)
    assert w.ledger.components["a"].runs == ((0, 6),)
    back = w.acquire(s, "a")
    assert w.granted(back)
    w.release(back)
    w.acquire(t, "b")
    w.settle()
    assert w.state("b") is State.RESIDENT


def test_what_cannot_be_restored_is_lost_and_cannot_be_acquired(make: Make) -> None:
    w, s, t, key = saved_and_inherited(make)
    w.register(t, "c", 10)
    behind = w.acquire(t, "c", "a", agent=1)
    assert w.refusal(behind).code == "too_large"
    behind = w.acquire(s, "a")
    w.prefetch(s, "a")
    w.move("b")
    w.move("a", fail="bus")
    (lost,) = [a for a in w.out if isinstance(a, Lost)]
    assert (lost.name, lost.generation) == ("a", 1)
    assert "saving 'a' failed (bus), and part of it had been overwritten" in lost.why
    assert w.granted(key), "who overwrote it may use it"
    assert w.ledger.pool.free == 4
    for refused in (
        behind,
        w.acquire(t, "a"),
        w.acquire(s, "a", await_registration=True),
        w.prefetch(s, "a"),
    ):
        assert w.refusal(refused).code == "device_failed"
        assert "'a' is damaged: saving 'a' failed (bus)" in w.refusal(refused).message
    assert w.ledger.prefetches == {}
    w.unregister(s, "a")
    assert w.told()[-1] == "drop host copy a"
    w.register(s, "a", 4)
    assert w.granted(w.use(s, "a"))


def test_what_is_damaged_while_it_is_unregistered_can_be_unregistered_again(make: Make) -> None:
    w, s, _, _ = saved_and_inherited(make)
    parked = w.acquire(s, "a", "unborn", await_registration=True)
    answer = w.unregister(s, "a")
    w.move("b")
    w.move("a", fail="bus")
    assert w.refusal(answer).code == "device_failed"
    w.register(s, "unborn", 1)
    assert w.refusal(parked).code == "device_failed"
    again = w.unregister(s, "a")
    assert w.answers[again] == Accept(*again)


def test_unregister_what_others_inherit_from_ends_with_the_write_back(make: Make) -> None:
    w, s, _, key = saved_and_inherited(make)
    answer = w.unregister(s, "a")
    w.move("a")
    assert w.told() == ["evicted a", f"accept {answer[1]}", "drop host copy a"]
    w.move("b")
    assert w.granted(key)


def test_gone_while_others_inherit_from_it(make: Make) -> None:
    for fail in (None, "bus"):
        w, s, _, key = saved_and_inherited(make)
        w.leave(s, alive=True)
        assert outcome(w) == ["lost a"]
        w.move("a", fail)
        assert "drop host copy a" in w.told()
        if fail is None:
            w.move("b")
            assert w.granted(key)
        else:
            assert w.refusal(key).code == "device_failed"
            assert w.ledger.pool.free == 10


def test_gone_while_it_loads_on_what_it_inherited(make: Make) -> None:
    for fail in (None, "bus"):
        w, s, t, _ = saved_and_inherited(make)
        w.leave(t)
        w.move("b", fail)
        assert w.told() == ["drop host copy b"]
        assert (w.ledger.leaving, w.ledger.pool.free) == (6, 4)
        w.move("a")
        assert w.ledger.pool.free == 10
        assert w.granted(w.use(s, "a"))


def test_both_gone_while_one_inherits_from_the_other(make: Make) -> None:
    for first, second in (("a", "b"), ("b", "a")):
        w, s, t, _ = saved_and_inherited(make)
        w.leave(s)
        w.leave(t)
        w.move(first)
        w.move(second)
        assert w.ledger.pool.free == 10


def test_an_heir_that_is_cancelled_stays_when_it_is_in(make: Make) -> None:
    w, s, _, key = saved_and_inherited(make)
    w.cancel(key)
    back = w.acquire(s, "a")
    w.move("a")
    assert outcome(w) == []
    w.move("b")
    assert outcome(w) == ["evict b (room)", "copy in a"]
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


def test_a_prefetch_inherits_too(make: Make) -> None:
    w, _, t = mutable_pair(make)
    w.prefetch(t, "b")
    w.ack("a")
    assert w.told() == ["copy out a", "copy in b"]
    w.move("a", fail="bus")
    assert w.told() == [], "and is not tried for ever"
    assert w.state("b") is State.ABSENT


def test_early_is_granted_on_what_is_not_saved_yet_if_it_can_only_be_read(make: Make) -> None:
    w, s, t = mutable_pair(make)
    key = w.acquire(t, "b", early=True)
    w.ack("a")
    assert w.told() == ["copy out a", "copy in b", f"grant {key[1]}"]
    w.move("a", fail="bus")
    assert w.leases[key] == set(), "its load had to fail, and it was told"
    assert w.ledger.pool.free == 4
    assert w.granted(w.acquire(s, "a"))


def test_early_waits_until_all_is_saved_that_it_could_write_to(make: Make) -> None:
    for strict in (False, True):
        w = make(10, strict=strict)
        s, t = w.open(), w.open()
        w.register(s, "a", 6, mutable=True)
        w.register(t, "b", 6, mutable=not strict)
        w.touch(s, "a")
        first = w.acquire(t, "b", early=True)
        w.ack("a")
        assert w.told() == ["copy out a", "copy in b"]
        joiner = w.acquire(t, "b", agent=1, early=True)
        also = w.acquire(t, "b", agent=2)
        assert not w.granted(joiner)
        w.move("a")
        assert w.told() == ["evicted a", f"grant {first[1]}", f"grant {joiner[1]}"]
        assert not w.granted(also)
        w.move("b")
        assert w.granted(also)
