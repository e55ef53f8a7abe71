"""Rules may change at any time, also for sessions that already wait or owe."""

from swapd.core import Residency
from swapd.core.actions import Fence
from tests.core.driver import MOVES, change_rules, drive
from tests.core.rules.common import blocked, strict_pair
from tests.core.rules.test_debts import lending
from tests.core.world import Make


def test_who_has_waited_longer_than_patience_is_now_goes_first(make: Make) -> None:
    w, held, others = blocked(make, patience_s=30.0)
    low = w.acquire(others[0], "c0")
    w.sleep(4.0)
    high = w.acquire(others[1], "c1", priority=9)
    w.change_rules(patience_s=2.0)
    w.release(held)
    w.settle()
    assert w.granted(low)
    assert not w.granted(high)


def test_a_higher_priority_overtakes_again_where_patience_is_longer_now(make: Make) -> None:
    w, held, others = blocked(make, patience_s=2.0)
    low = w.acquire(others[0], "c0")
    w.sleep(4.0)
    high = w.acquire(others[1], "c1", priority=9)
    w.change_rules(patience_s=30.0)
    w.release(held)
    w.settle()
    assert w.granted(high)
    assert not w.granted(low)


def test_what_stays_for_its_minimum_residency_goes_when_that_is_none_now(make: Make) -> None:
    w = make(10, residency_factor=100.0, residency_bound_s=60.0)
    s, t = w.open(), w.open()
    w.register(s, "a", 8)
    w.register(t, "b", 8)
    key = w.acquire(s, "a")
    w.sleep(1.0)
    w.settle()
    for _ in range(2):  # it comes back at once: it is busy
        w.release(key)
        key = w.acquire(s, "a")
    w.release(key)
    waits = w.acquire(t, "b")
    assert "a" not in w.evictions()
    w.change_rules(residency_bound_s=0.0)
    w.settle()
    assert w.granted(waits)


def test_a_worker_that_is_given_longer_is_fenced_later(make: Make) -> None:
    w, s, t = strict_pair(make, ack_timeout_s=2.0)
    w.acquire(t, "b")
    w.sleep(1.0)
    w.change_rules(ack_timeout_s=8.0)
    w.sleep(6.0)
    assert not w.fenced
    w.sleep(1.0)
    assert w.fenced == [s]


def test_a_worker_that_has_taken_too_long_by_now_is_fenced_at_once(make: Make) -> None:
    w, s, t = strict_pair(make, ack_timeout_s=60.0)
    w.acquire(t, "b")
    w.sleep(10.0)
    w.change_rules(ack_timeout_s=5.0)
    (fence,) = w.sleep(0.0)
    assert isinstance(fence, Fence)
    assert fence.session == s
    assert "within 5 s" in fence.why


def test_who_is_to_let_go_of_what_is_lent_has_as_long_as_is_said_now(make: Make) -> None:
    w, s, t, name = lending(make)  # 2 s
    w.hear(w.open(), 3, "lifeline")  # 60 s, independent of the others
    w.sleep(1.0)
    w.change_rules(ack_timeout_s=20.0)
    w.sleep(18.0)
    assert not w.fenced
    fences = [a for a in w.sleep(1.0) if isinstance(a, Fence)]
    assert {fence.session for fence in fences} == {s, t}
    assert all("within 20 s" in fence.why for fence in fences)
    w.move(name)


def test_the_guarantees_hold_whatever_changes_when() -> None:
    for seed in range(6):
        drive(
            Residency,
            seed,
            steps=200,
            strict=bool(seed % 2),
            moves={**MOVES, change_rules: 4},
        )
