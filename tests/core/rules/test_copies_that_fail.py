"""Copies that fail."""

from swapd.core.states import State
from tests.core.world import Make


def test_if_a_load_fails_it_stays_in_host_memory_and_the_waiters_are_refused(make: Make) -> None:
    w = make(10)
    s, t = w.open(), w.open()
    w.register(s, "a", 6)
    keys = [w.acquire(s, "a"), w.acquire(t, "a")]
    w.move("a", fail="bus")
    for key in keys:
        assert w.refusal(key).code == "device_failed"
        assert "it is still in host memory" in w.refusal(key).message
    assert w.state("a") is State.ABSENT
    assert w.ledger.pool.free == 10
    assert w.granted(w.use(s, "a"))


def test_if_one_of_several_loads_fails_the_other_is_idle(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a")
    w.register(s, "b")
    key = w.acquire(s, "a", "b")
    w.move("a", fail="bus")
    assert w.refusal(key).code == "device_failed"
    w.move("b")
    assert "b" in w.ledger.idle
