"""Every agent that can never be granted is found, and no other."""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from swapd.core.deadlock import stuck as stuck_among
from tests.core.pool import SetPool

SIZES = {"a": 1, "b": 2, "c": 3, "d": 4}


def within(budget: int) -> Callable[[AbstractSet[str]], bool]:
    return lambda names: sum(SIZES[n] for n in names) <= budget


def stuck(
    wants: Mapping[int, AbstractSet[str]],
    holds: Mapping[int, AbstractSet[str]],
    fits: Callable[[AbstractSet[str]], bool],
) -> set[int]:
    return stuck_among(wants, SetPool(wants, holds, fits))


def test_nobody_waits() -> None:
    assert stuck({}, {}, within(0)) == set()


def test_two_that_hold_what_the_other_needs() -> None:
    wants = {1: {"d"}, 2: {"c"}}
    holds = {1: {"c"}, 2: {"d"}}
    assert stuck(wants, holds, within(6)) == {1, 2}
    assert stuck(wants, holds, within(7)) == set()


def test_one_that_cannot_fit_beside_what_it_holds_itself() -> None:
    assert stuck({1: {"d"}}, {1: {"c"}}, within(6)) == {1}


def test_three_in_a_circle() -> None:
    wants = {1: {"b"}, 2: {"c"}, 3: {"d"}}
    holds = {1: {"d"}, 2: {"b"}, 3: {"c"}}
    assert stuck(wants, holds, within(9)) == set()
    assert stuck({k: v | {"a"} for k, v in wants.items()}, holds, within(9)) == {1, 2, 3}


def test_who_can_finish_first_lets_the_others_finish() -> None:
    wants = {1: {"a"}, 2: {"d"}}
    holds = {1: {"b"}, 2: {"c"}}
    assert stuck(wants, holds, within(7)) == set()


def test_one_that_can_finish_is_not_named_with_those_that_cannot() -> None:
    wants = {1: {"d"}, 2: {"d"}, 3: {"a"}}
    holds = {1: {"c"}, 2: {"b"}, 3: set[str]()}
    assert stuck(wants, holds, within(6)) == {1, 2}


SETS = st.frozensets(st.sampled_from("abcd"), max_size=3)


@given(st.integers(1, 10), st.lists(st.tuples(SETS, SETS), max_size=5))
def test_just_those_are_stuck_for_whom_no_order_is_left(
    budget: int, agents: list[tuple[frozenset[str], frozenset[str]]]
) -> None:
    """By definition: try every order in which they might finish."""
    fits = within(budget)
    wants = {i: want for i, (want, _) in enumerate(agents)}
    holds = {i: hold for i, (_, hold) in enumerate(agents)}
    finished: set[int] = set()
    for order in permutations(wants):
        left = set(wants)
        for agent in order:
            held = frozenset().union(*(holds[b] for b in left))
            if not fits(wants[agent] | held):
                break
            left.remove(agent)
        finished |= set(wants) - left
    assert stuck(wants, holds, fits) == set(wants) - finished
