"""Components with the same bytes share one copy on the device."""

from swapd.core.actions import CopyIn, Evict, Grant, Hasten, Refuse
from swapd.core.registry import SHARE_PATIENCE_S
from swapd.core.states import State
from tests.core.rules.test_shared_masters import fill
from tests.core.world import Make, World


def twin(w: World, session: int, name: str, nbytes: int = 4, policy: str = "lru") -> str:
    w.ask_register(session, name, nbytes, policy, content="x")  # type: ignore[arg-type]
    fill(w, session, name)
    return name


def pair(make: Make, chunks: int = 10, **rules: float) -> tuple[World, int, int]:
    """`a` of one session and `b` of another are twins of 4 chunks."""
    w = make(chunks, **rules)
    first, second = w.open("first"), w.open("second")
    twin(w, first, "a")
    twin(w, second, "b")
    return w, first, second


def used(w: World) -> int:
    return w.ledger.pool.total - w.ledger.pool.free


def test_one_joins_the_other_and_nothing_is_copied(make: Make) -> None:
    w, first, second = pair(make)
    held = w.use(first, "a")
    joined = w.acquire(second, "b")
    loads = [a for a in w.out if isinstance(a, CopyIn)]
    assert [(a.name, a.joins) for a in loads] == [("b", "a")]
    w.settle()
    assert w.granted(joined, held)
    answer = w.answer(joined)
    assert isinstance(answer, Grant)
    assert not answer.loaded
    assert used(w) == w.bytes_in == 4
    assert (w.ledger.loads, w.ledger.hits, w.ledger.evictions) == (1, 1, 0)


def test_one_of_them_stays_when_nobody_needs_them(make: Make) -> None:
    w, first, second = pair(make)
    held, other = w.use(first, "a"), w.use(second, "b")
    w.release(held)
    assert [(a.name, a.reason) for a in w.out if isinstance(a, Evict)] == [("a", "joined")]
    w.release(other)
    assert w.state("b") is State.RESIDENT
    w.use(first, "a")
    assert w.state("b") is State.ABSENT
    assert used(w) == w.bytes_in == 4
    assert w.ledger.evictions == 0


def test_four_replicas_in_turn_copy_once(make: Make) -> None:
    w, first, second = pair(make, chunks=5)
    third, fourth = w.open(), w.open()
    twin(w, third, "c")
    twin(w, fourth, "d")
    for _ in range(3):
        for session, name in ((first, "a"), (second, "b"), (third, "c"), (fourth, "d")):
            w.release(w.use(session, name))
    assert w.bytes_in == 4


def test_who_comes_while_the_bytes_come_in_waits_for_them(make: Make) -> None:
    w, first, second = pair(make)
    load = w.acquire(first, "a")
    other = w.acquire(second, "b", priority=5)
    assert [a.name for a in w.out if isinstance(a, Hasten)] == ["a"]
    w.move("a")
    w.settle()
    assert w.granted(load, other)
    assert used(w) == w.bytes_in == 4


def test_who_waited_for_a_load_that_fails_loads_it_itself(make: Make) -> None:
    w, first, second = pair(make)
    w.acquire(first, "a")
    other = w.acquire(second, "b")
    w.move("a", fail="no")
    w.settle()
    assert w.granted(other)
    assert w.bytes_in == 4


def test_both_must_go_before_their_memory_is_free(make: Make) -> None:
    w, first, second = pair(make)
    held, other = w.use(first, "a"), w.use(second, "b")
    third = w.open()
    w.register(third, "c", 7)
    waits = w.acquire(third, "c")
    assert {name for _, name in w.wanted} == {"a", "b"}
    w.release(held)
    assert not w.granted(waits)
    w.release(other)
    w.settle()
    assert w.granted(waits)


def test_agents_that_hold_twins_and_wait_are_deadlocked_if_one_copy_is_too_much(
    make: Make,
) -> None:
    w, first, second = pair(make)
    w.use(first, "a")
    w.use(second, "b")
    w.register(first, "c", 7)
    w.register(second, "d", 7)
    w.acquire(first, "c")
    last = w.acquire(second, "d")
    assert w.refusal(last).code == "deadlock"


def test_agents_that_wait_for_twins_that_have_left_are_deadlocked_as_for_any(make: Make) -> None:
    w, first, second = pair(make)
    w.touch(first, "a")
    w.evict_now(first, "a")
    for session, name in ((first, "c"), (second, "d")):
        w.register(session, name, 5)
        w.use(session, name)
    w.acquire(first, "a")
    last = w.acquire(second, "b")
    assert w.refusal(last).code == "deadlock"


def test_agents_that_hold_twins_and_wait_are_not_deadlocked_if_one_copy_leaves_room(
    make: Make,
) -> None:
    w, first, second = pair(make)
    held, other = w.use(first, "a"), w.use(second, "b")
    w.register(first, "c", 6)
    w.register(second, "d", 6)
    one, two = w.acquire(first, "c"), w.acquire(second, "d")
    assert not isinstance(w.answer(two), Refuse)
    w.settle()
    assert w.granted(one)
    w.release(one)
    w.settle()
    assert w.granted(two)
    w.release(held)
    w.release(other)


def test_an_update_of_one_leaves_the_other_alone(make: Make) -> None:
    w, first, second = pair(make)
    held, other = w.use(first, "a"), w.use(second, "b")
    w.renew(first, "a")
    w.release(held)
    anew = w.acquire(first, "a")
    w.settle()
    assert w.granted(anew)
    assert used(w) == 8  # `World` compares the bytes of both
    w.release(other)


def test_the_session_of_one_may_go_at_any_moment(make: Make) -> None:
    w, first, second = pair(make)
    w.use(first, "a")
    w.acquire(second, "b")
    w.leave(second)
    w.settle()
    assert used(w) == 4
    third = w.open()
    twin(w, third, "c")
    key = w.use(third, "c")
    w.leave(first)
    assert used(w) == 4
    w.release(key)
    assert w.bytes_in == 4


def test_strict_isolation_frees_the_chunks_when_the_last_has_unmapped_them(make: Make) -> None:
    w, first, second = pair(make, strict=True)
    held, other = w.use(first, "a"), w.use(second, "b")
    third = w.open()
    w.register(third, "c", 7)
    waits = w.acquire(third, "c")
    w.release(held)
    w.release(other)
    w.ack("b")
    w.settle()
    assert not w.acks
    assert w.granted(waits)


def test_a_name_alone_makes_no_twins(make: Make) -> None:
    """Who waits too long for the bytes of another fills its own, and nobody compares these."""
    w = make(10)
    first, second = w.open(), w.open()
    w.ask_register(first, "a", 4, content="x")
    w.ask_register(second, "b", 4, content="x")
    w.sleep(SHARE_PATIENCE_S + 1.0)
    fill(w, second, "b")
    fill(w, first, "a")
    w.use(first, "a")
    w.use(second, "b")
    assert used(w) == w.bytes_in == 8


def test_a_prefetch_of_what_a_twin_has_does_nothing(make: Make) -> None:
    w, first, second = pair(make)
    w.use(first, "a")
    w.prefetch(second, "b")
    assert not [a for a in w.out if isinstance(a, CopyIn | Evict)]
    assert not w.ledger.prefetches
