"""Components with equal contents share one host copy."""

from swapd.core.actions import Accept, DropHostCopy, MakeHostCopy
from swapd.core.registry import SHARE_PATIENCE_S
from tests.core.world import Make, World


def made(w: World) -> list[tuple[str, int]]:
    """The orders of the last event: for which component, and whose host copy it shares."""
    return [(a.name, a.original) for a in w.out if isinstance(a, MakeHostCopy)]


def ask(w: World, session: int, name: str, content: str = "x") -> tuple[int, int]:
    return w.ask_register(session, name, 4, content=content)


def fill(w: World, session: int, name: str) -> None:
    """Its host copy is made, filled and sealed."""
    w.make_master(w.newest[name])
    w.commit(session, name)
    w.make_master(w.newest[name])


def test_what_is_laid_out_otherwise_is_not_shared(make: Make) -> None:
    w, first, second = two(make)
    fill(w, first, "a")
    w.ask_register(second, "b", 4, content="x", layout="another")
    assert made(w) == [("b", 0)]


def two(make: Make) -> tuple[World, int, int]:
    """A world with two sessions; the component of the first, `a`, is being filled."""
    w = make(10)
    first, second = w.open("first"), w.open("second")
    ask(w, first, "a")
    return w, first, second


def test_what_is_filled_is_shared_by_those_that_come_after(make: Make) -> None:
    w, first, second = two(make)
    fill(w, first, "a")
    ask(w, second, "b")
    assert made(w) == [("b", w.newest["a"])]
    fill(w, second, "b")
    w.unregister(first, "a")
    ask(w, first, "c")
    assert made(w) == [("c", w.newest["b"])]


def test_who_shares_passes_it_on_though_it_is_not_made_yet_and_its_original_is_gone(
    make: Make,
) -> None:
    w, first, second = two(make)
    fill(w, first, "a")
    asked = ask(w, second, "b")
    w.unregister(first, "a")
    ask(w, first, "c")
    assert made(w) == [("c", w.newest["b"])]
    w.make_master(w.newest["b"], fail="limit")
    assert not isinstance(w.answers[asked], Accept)
    fill(w, first, "c")
    ask(w, second, "d")
    assert made(w) == [("d", w.newest["c"])]


def test_a_content_of_another_size_is_another(make: Make) -> None:
    w, first, second = two(make)
    fill(w, first, "a")
    w.ask_register(second, "b", 5, content="x")
    assert made(w) == [("b", 0)]


def test_those_that_come_meanwhile_wait_for_the_seal(make: Make) -> None:
    w, first, second = two(make)
    asked = ask(w, second, "b")
    assert not made(w)
    w.make_master(w.newest["a"])
    w.commit(first, "a")
    w.make_master(w.newest["a"])
    assert made(w) == [("b", w.newest["a"])]
    w.make_master(w.newest["b"])
    assert isinstance(w.answers[asked], Accept)


def test_a_name_is_taken_while_its_component_waits_for_the_bytes_of_another(make: Make) -> None:
    w, first, second = two(make)
    ask(w, second, "b")
    assert w.refusal(w.ask_register(second, "b", 4, mutable=True)).code == "duplicate_name"
    fill(w, first, "a")
    fill(w, second, "b")
    w.touch(second, "b")
    w.unregister(second, "b")
    assert w.evictions() == ["b"]


def test_the_next_fills_its_own_if_the_first_is_unregistered(make: Make) -> None:
    w, first, second = two(make)
    ask(w, second, "b")
    w.make_master(w.newest["a"])
    w.unregister(first, "a")
    assert made(w) == [("b", 0)]


def test_the_next_fills_its_own_if_the_first_cannot_be_made(make: Make) -> None:
    w, _, second = two(make)
    ask(w, second, "b")
    w.make_master(w.newest["a"], fail="host_memory")
    assert made(w) == [("b", 0)]


def test_the_next_fills_its_own_if_the_session_of_the_first_goes(make: Make) -> None:
    w, first, second = two(make)
    ask(w, second, "b")
    w.leave(first)
    assert made(w) == [("b", 0)]
    fill(w, second, "b")
    w.make_masters()


def test_a_first_that_takes_too_long_is_not_waited_for(make: Make) -> None:
    w, first, second = two(make)
    ask(w, second, "b")
    at = w.core.next_deadline()
    assert at is not None
    assert SHARE_PATIENCE_S <= at - w.now < SHARE_PATIENCE_S + 1
    w.sleep(SHARE_PATIENCE_S + 1)
    assert [a.original for a in w.log if isinstance(a, MakeHostCopy)] == [0, 0]
    fill(w, first, "a")
    fill(w, second, "b")


def test_nothing_is_left_of_one_that_goes_while_it_waits(make: Make) -> None:
    w, first, second = two(make)
    ask(w, second, "b")
    w.leave(second)
    assert not [a for a in w.out if isinstance(a, DropHostCopy)]
    fill(w, first, "a")
    assert not made(w)


def test_two_that_load_the_same_in_another_order_do_not_wait_for_each_other(make: Make) -> None:
    w, first, second = two(make)
    ask(w, second, "b", "y")
    ask(w, first, "c", "y")
    assert not made(w)
    ask(w, second, "d", "x")
    assert made(w) == [("d", 0)]
