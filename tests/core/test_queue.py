"""First come, first served within a priority; nobody is overtaken for longer than patience."""

from swapd.core.queue import WaitQueue
from swapd.core.records import Waiter


def waiter(
    seq: int, *, priority: int = 0, arrived: float = 0.0, deadline: float | None = None
) -> Waiter:
    return Waiter(
        session=1,
        request=seq,
        agent=0,
        asked=("a",),
        names=("a",),
        priority=priority,
        deadline=deadline,
        await_registration=False,
        arrived=arrived,
        seq=seq,
    )


def queue_of(*waiters: Waiter, patience_s: float = 30.0) -> WaitQueue:
    queue = WaitQueue(patience_s)
    for w in waiters:
        queue.add(w)
        queue.push(w)
    return queue


def test_an_empty_queue_has_no_head_and_no_deadline() -> None:
    queue = WaitQueue(30.0)
    assert queue.head(0.0) is None
    assert queue.next_deadline(0.0) is None
    assert queue.expired(1e9) == []
    assert len(queue) == 0


def test_first_come_first_served() -> None:
    first, second = waiter(1), waiter(2)
    queue = queue_of(first, second)
    assert queue.head(0.0) is first
    queue.forget(first)
    assert queue.head(0.0) is second


def test_higher_priority_goes_first() -> None:
    low, high, higher = waiter(1), waiter(2, priority=1), waiter(3, priority=2)
    assert queue_of(low, high, higher).queued == [higher, high, low]


def test_the_oldest_goes_first_once_its_patience_is_over() -> None:
    old, high = waiter(1, arrived=10.0), waiter(2, priority=1, arrived=11.0)
    queue = queue_of(old, high)
    assert queue.head(39.9) is high
    assert queue.next_deadline(39.9) == 40.0
    assert queue.head(40.0) is old


def test_patience_that_is_over_is_not_due_again() -> None:
    queue = queue_of(waiter(1), waiter(2, priority=1))
    assert queue.next_deadline(30.0) is None


def test_patience_is_over_at_the_very_moment_that_was_named() -> None:
    for arrived in (0.1 * n for n in range(1000)):
        old = waiter(1, arrived=arrived)
        queue = queue_of(old, waiter(2, priority=1, arrived=arrived))
        due = queue.next_deadline(arrived)
        assert due is not None
        assert queue.head(due) is old


def test_patience_counts_from_arrival_also_for_who_was_queued_late() -> None:
    """It waited for a registration first, and has waited longest of all."""
    parked, pushed_before = waiter(1, arrived=0.0), waiter(2, arrived=20.0)
    queue = queue_of(pushed_before, waiter(3, priority=1, arrived=20.0))
    queue.add(parked)
    queue.push(parked)
    assert queue.head(30.0) is parked


def test_a_known_waiter_is_not_queued_until_pushed() -> None:
    queue = WaitQueue(30.0)
    w = waiter(1)
    queue.add(w)
    assert w.key in queue
    assert queue.get(w.key) is w
    assert not w.queued
    assert queue.head(0.0) is None
    queue.push(w)
    assert w.queued
    queue.leave(w)
    queue.leave(w)
    assert list(queue) == [w]
    assert queue.queued == []


def test_deadlines_pass_in_order_and_are_due_until_forgotten() -> None:
    late, early = waiter(1, deadline=9.0), waiter(2, deadline=5.0)
    queue = queue_of(late, early, waiter(3))
    assert queue.next_deadline(0.0) == 5.0
    assert queue.expired(4.9) == []
    assert queue.expired(9.0) == [early, late]
    queue.forget(early)
    assert queue.next_deadline(0.0) == 9.0


def test_nothing_is_left_of_a_forgotten_waiter() -> None:
    queue = queue_of(*(waiter(i, deadline=1000.0 - i) for i in range(50)))
    for w in list(queue):
        queue.forget(w)
    assert len(queue) == 0
    assert queue.next_deadline(0.0) is None
    kept = vars(queue) | {"patience_s": 0}
    assert not any(kept.values())
