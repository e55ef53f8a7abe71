"""Victims: enough, none needless, or None. Busy components stay, within a bound."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapd.core import policy
from swapd.core.policy import BUSY_SHARE, is_busy, protected_until, quantum_s, victims

IDLE = st.lists(st.integers(0, 12), max_size=8).map(
    lambda sizes: [(f"c{i}", chunks) for i, chunks in enumerate(sizes)]
)


def test_the_least_recently_used_go_first() -> None:
    assert victims(3, [("old", 2), ("mid", 2), ("new", 2)]) == ["old", "mid"]


def test_what_turns_out_superfluous_is_spared() -> None:
    assert victims(10, [("a", 1), ("b", 10)]) == ["b"]


def test_of_two_superfluous_the_warmer_is_spared() -> None:
    assert victims(5, [("cold", 1), ("warm", 1), ("big", 4)]) == ["cold", "big"]


def test_nothing_is_evicted_if_all_together_are_too_few() -> None:
    assert victims(5, [("a", 2), ("b", 2)]) is None


@pytest.mark.parametrize("need", [0, -3])
def test_nothing_is_evicted_if_nothing_is_needed(need: int) -> None:
    assert victims(need, [("a", 2)]) == []


@given(st.integers(-5, 60), IDLE)
def test_victims_are_enough_or_none(need: int, idle: list[tuple[str, int]]) -> None:
    sizes = dict(idle)
    chosen = victims(need, idle)
    if chosen is None:
        assert sum(sizes.values()) < need
    else:
        assert sum(sizes[n] for n in chosen) >= need


@given(st.integers(1, 60), IDLE)
def test_every_victim_is_needed(need: int, idle: list[tuple[str, int]]) -> None:
    sizes = dict(idle)
    chosen = victims(need, idle) or []
    for left_out in chosen:
        assert sum(sizes[n] for n in chosen if n != left_out) < need


@given(st.integers(1, 30), IDLE)
def test_victims_come_in_order_of_use_and_never_twice(
    need: int, idle: list[tuple[str, int]]
) -> None:
    chosen = victims(need, idle) or []
    order = [name for name, _ in idle]
    assert chosen == [n for n in order if n in chosen]


@given(st.integers(1, 30), IDLE)
def test_none_only_if_no_choice_would_do(need: int, idle: list[tuple[str, int]]) -> None:
    some = any(
        sum(n for _, n in pick) >= need
        for k in range(len(idle) + 1)
        for pick in combinations(idle, k)
    )
    assert (victims(need, idle) is not None) == some


def test_a_family_goes_when_the_last_of_its_parts_would_and_that_part_first() -> None:
    idle = [("a", ""), ("f/0", "f"), ("b", ""), ("f/1", "f"), ("c", "")]
    assert policy.eviction_order(idle, set()) == ["a", "b", "f/1", "f/0", "c"]
    assert policy.eviction_order(idle, {"f", "g"}) == ["a", "b", "c", "f/1", "f/0"], (
        "it is used now"
    )


@given(st.lists(st.sampled_from(["", "f", "g"])), st.sets(st.sampled_from(["f", "g", "h"])))
def test_each_has_its_turn_and_families_stay_together(of: list[str], in_use: set[str]) -> None:
    idle = [(f"c{i}", family) for i, family in enumerate(of)]
    order = policy.eviction_order(idle, in_use)
    assert sorted(order) == sorted(name for name, _ in idle)
    single = [name for name, family in idle if not family]
    assert [name for name in order if name in single] == single
    for family in {"f", "g"} & set(of):
        parts = [name for name, of_ in idle if of_ == family]
        first = order.index(parts[-1])
        assert order[first : first + len(parts)] == parts[::-1]


def test_a_component_is_busy_if_its_owner_comes_back_at_once() -> None:
    assert is_busy(0.0, swap_in_s=1.0)
    assert not is_busy(BUSY_SHARE, swap_in_s=1.0)
    assert not is_busy(None, swap_in_s=1.0)
    assert not is_busy(0.0, swap_in_s=0.0)


def test_the_quantum_is_a_multiple_of_the_swap_in_time_within_a_bound() -> None:
    assert quantum_s(0.1, factor=8.0, bound_s=2.0) == pytest.approx(0.8)
    assert quantum_s(1.0, factor=8.0, bound_s=2.0) == 2.0
    assert quantum_s(1.0, factor=0.0, bound_s=2.0) == 0.0


def until(gap_s: float | None, idle_since: float, factor: float = 8.0) -> float:
    return protected_until(
        resident_since=100.0,
        idle_since=idle_since,
        swap_in_s=0.2,
        gap_s=gap_s,
        factor=factor,
        bound_s=1.0,
    )


def test_an_idle_component_that_is_not_busy_may_go_at_once() -> None:
    assert until(gap_s=None, idle_since=100.5) == 100.5
    assert until(gap_s=0.2, idle_since=100.5) == 100.5


def test_a_busy_component_stays_until_its_owner_fails_to_come_back() -> None:
    assert until(gap_s=0.01, idle_since=100.5) == pytest.approx(100.6)


def test_a_busy_component_stays_no_longer_than_its_quantum() -> None:
    assert until(gap_s=0.01, idle_since=100.99) == 101.0
    assert until(gap_s=0.01, idle_since=130.0) == 101.0


def test_factor_0_turns_the_rule_off() -> None:
    assert until(gap_s=0.01, idle_since=100.5, factor=0.0) == 100.0


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (0, set()),
        (-5, set()),
        (9, set()),
        (10, {4}),
        (25, {2, 6}),
        (30, {1, 4, 6}),
        (40, {1, 3, 5, 7}),
        (70, {0, 1, 2, 4, 5, 6, 7}),
        (80, set(range(8))),
        (1000, set(range(8))),
    ],
)
def test_what_is_kept_is_spread_evenly(room: int, kept: set[int]) -> None:
    assert policy.spread([10] * 8, room) == kept


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(-10, 300))
def test_what_is_kept_fits(sizes: list[int], room: int) -> None:
    kept = policy.spread(sizes, room)
    assert sum(sizes[i] for i in kept) <= max(room, 0)
    if sum(sizes) <= room:
        assert len(kept) == len(sizes)


@given(st.integers(1, 60), st.integers(0, 60))
def test_between_kept_parts_of_one_size_are_as_many_as_anywhere(parts: int, room: int) -> None:
    kept = sorted(policy.spread([1] * parts, room))
    assert len(kept) == min(parts, room)
    gaps = [b - a for a, b in pairwise(kept)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_two_of_the_largest_have_room_beside_what_is_kept() -> None:
    assert policy.room_to_keep([3, 4, 5], 12, 2) == 12, "all of it fits, so nothing is copied"
    assert policy.room_to_keep([3, 4, 5], 11, 2) == 1
    assert policy.room_to_keep([], 11, 2) == 11
