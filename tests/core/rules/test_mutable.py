"""Components that their workers write to."""

from swapd.core.actions import Evicted, Lost
from swapd.core.states import State
from tests.core.rules.common import mutable_pair
from tests.core.world import Make, outcome


def test_nothing_lost_a_mutable_component_is_written_back_before_its_chunks_are_reused(
    make: Make,
) -> None:
    w, _, t = mutable_pair(make)
    w.acquire(t, "b")
    assert outcome(w) == ["evict a (room)", "revoke a (ack)"], "strict, whatever the rules"
    w.ack("a")
    assert w.told() == ["copy out a"]
    assert w.state("a") is State.WRITING_BACK
    w.move("a")
    assert w.out[0] == Evicted("a", 1, 6, 6)
    assert w.told() == ["evicted a", "copy in b"]


def test_a_mutable_component_that_nobody_could_write_is_not_written_back(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6, mutable=True)
    w.register(t, "b", 6)
    w.touch(t, "a")
    w.acquire(t, "b")
    assert outcome(w) == ["evict a (room)", "copy in b"]


def test_it_is_asked_for_again_while_it_leaves_and_comes_back(make: Make) -> None:
    w, s, t = mutable_pair(make)
    first = w.acquire(t, "b")
    back = w.acquire(s, "a")
    w.settle()
    assert w.granted(first)
    w.release(first)
    w.settle()
    assert w.granted(back)


def test_if_the_write_back_fails_it_stays_and_the_waiter_is_refused(make: Make) -> None:
    w, s, t = mutable_pair(make)
    key = w.acquire(t, "b")
    w.ack("a")
    w.move("a", fail="bus")
    assert w.refusal(key).code == "device_failed"
    assert w.state("a") is State.RESIDENT
    assert w.granted(w.acquire(s, "a"))


def test_if_the_write_back_fails_who_waits_for_all_of_it_is_told_why(make: Make) -> None:
    w, _, t = mutable_pair(make)
    key = w.workspace(t, 6)
    w.ack("a")
    w.move("a", fail="bus")
    refusal = w.refusal(key)
    assert refusal.code == "device_failed"
    assert "(bus), and it did not reach the host: it is still on the device" in refusal.message


def test_if_the_write_back_fails_who_found_room_elsewhere_is_not_refused(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6, mutable=True)
    w.register(s, "c", 4)
    w.register(t, "b", 4)
    w.touch(s, "a")
    held = w.use(s, "c")
    key = w.acquire(t, "b")
    assert w.evictions() == ["a"]
    w.release(held)
    w.unregister(s, "c")
    w.ack("a")
    w.move("a", fail="bus")
    assert key not in w.answers, "it waits for its copy only"
    w.settle()
    assert w.granted(key)


def test_who_was_parked_when_it_was_to_go_goes_on_when_the_write_back_fails(make: Make) -> None:
    w, s, t = mutable_pair(make)
    w.workspace(t, 6)
    back = w.acquire(t, "a", agent=1, await_registration=True)
    answer = w.unregister(s, "a")
    w.ack("a")
    w.move("a", fail="bus")
    assert w.refusal(answer).code == "device_failed"
    assert w.granted(back)


def test_a_failed_write_back_leaves_the_bytes_to_be_written_back_later(make: Make) -> None:
    w, _, t = mutable_pair(make)
    w.acquire(t, "b")
    w.ack("a")
    w.move("a", fail="bus")
    w.acquire(t, "b")
    assert outcome(w) == ["evict a (room)", "copy out a"], "it is unmapped already"


def test_a_waiter_behind_a_failed_write_back_may_use_what_stayed(make: Make) -> None:
    w, s, t = mutable_pair(make)
    w.register(t, "c", 8)
    w.acquire(t, "b")
    w.acquire(t, "c", agent=1)
    back = w.acquire(s, "a")
    w.ack("a")
    w.move("a", fail="bus")
    assert w.granted(back)


def test_a_failed_write_back_for_a_prefetch_is_not_tried_forever(make: Make) -> None:
    w, _, t = mutable_pair(make)
    w.prefetch(t, "b")
    w.ack("a")
    w.move("a", fail="bus")
    assert w.out == []
    assert w.state("a") is State.RESIDENT


def test_lost_is_said_when_the_worker_dies_with_what_it_wrote(make: Make) -> None:
    w, s, _ = mutable_pair(make)
    w.leave(s)
    assert [type(a) for a in w.out[:1]] == [Lost]
    assert w.told() == ["lost a", "drop host copy a"]


def test_nothing_is_lost_if_all_was_written_back(make: Make) -> None:
    w, s, t = mutable_pair(make)
    w.use(t, "b")
    w.leave(s)
    assert w.told() == ["drop host copy a"]


def test_what_a_living_process_may_still_write_is_not_reused_until_it_ends(make: Make) -> None:
    w, s, t = mutable_pair(make)
    key = w.acquire(t, "b", await_registration=True)
    w.leave(s, alive=True)
    assert w.refusal(key).code == "too_large"
    assert w.ledger.pool.free == 4
    w.exit(s)
    assert w.ledger.pool.free == 10
    assert w.granted(w.use(t, "b"))


def test_what_a_living_process_may_only_read_is_reused_at_once(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 6)
    w.touch(s, "a")
    w.leave(s, alive=True)
    assert w.ledger.pool.free == 10
    w.exit(s)
