"""Descriptions of the core for people."""

from tests.core.rules.common import blocked
from tests.core.world import Make


def test_repr_is_for_people(make: Make) -> None:
    w, _, others = blocked(make)
    assert repr(w.core) == "<Residency 10 B/10 B, 1 leases, 0 waiting, loading nothing>"
    w.acquire(others[0], "c0")
    assert "1 waiting" in repr(w.core)


def test_of_those_that_hold_and_wait_the_one_that_must_run_overtakes(make: Make) -> None:
    """The oldest of them holds too little to be of use."""
    w = make(10)
    s, a, b, h = w.open(), w.open(), w.open(), w.open()
    for name, size in {"k": 6, "a": 1, "b": 3, "x": 1, "y": 1, "c": 8}.items():
        w.register(s, name, size)
    k = w.use(s, "k")
    w.use(a, "a")
    w.use(b, "b")
    x, y = w.acquire(a, "x"), w.acquire(b, "y")
    w.acquire(h, "c", priority=1)
    w.release(k)
    w.settle()
    assert w.granted(y)
    assert not w.granted(x)


def test_two_that_could_run_were_it_not_for_what_never_leaves_are_deadlocked(make: Make) -> None:
    w = make(10)
    s, a, b = w.open(), w.open(), w.open()
    w.register(s, "r", 4, policy="permanent")
    for name in "abxy":
        w.register(s, name, 3)
    w.touch(s, "r")
    w.use(a, "a")
    w.use(b, "b")
    x, y = w.acquire(a, "x"), w.acquire(b, "y")
    assert w.refusal(y).code == "deadlock"
    assert x in w.waiting
