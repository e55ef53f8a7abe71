"""How the core estimates the needs of each session at once, and its need to stay."""

from swapd.core import status
from tests.core.world import Make, World


def needs(w: World, session: int) -> tuple[int, int]:
    """The bytes that must stay, and the bytes of its turn."""
    said = status.session_status(w.ledger, session)
    return said.stays_bytes, said.turn_bytes


def test_the_most_that_one_lease_held_is_what_a_session_needs_at_once(make: Make) -> None:
    w = make(10)
    s, other = w.open(), w.open()
    for name, nbytes in {"a": 3, "b": 2, "c": 4}.items():
        w.register(s, name, nbytes)
    assert needs(w, s) == (0, 0), "it may use one after the other"
    w.touch(s, "c")
    w.touch(s, "a", "b")
    assert needs(w, s) == (0, 5)
    w.touch(s, "c")
    assert needs(w, s) == (0, 5)
    w.touch(other, "a", "b", "c")
    assert needs(w, other) == (0, 0), "it is the need of who registered them"
    w.touch(s, "a", "b", "c")
    assert needs(w, s) == (0, 9)


def test_what_is_registered_no_more_is_not_needed(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name, nbytes in {"a": 3, "b": 2, "c": 4}.items():
        w.register(s, name, nbytes)
    w.touch(s, "a", "b")
    w.unregister(s, "a")
    assert needs(w, s) == (0, 2)
    w.touch(s, "c")
    assert needs(w, s) == (0, 4)
    w.register(s, "a", 1)
    assert needs(w, s) == (0, 4), "it is another one of that name"


def test_what_stays_is_needed_by_nobody_again(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 3, policy="permanent")
    w.register(s, "b", 2)
    assert needs(w, s) == (3, 0), "it is to come in, and to stay"
    w.touch(s, "a", "b")
    assert needs(w, s) == (3, 2)
    w.pin(s, "b")
    assert needs(w, s) == (3, 2), "a pin is let go where that is needed"


def test_what_a_session_borrows_is_not_what_it_needs_again(make: Make) -> None:
    w = make(10)
    s = w.open()
    w.register(s, "a", 3)
    w.touch(s, "a")
    lent = w.workspace(s, 8)
    w.settle()
    assert needs(w, s) == (0, 3)
    w.release(lent)
