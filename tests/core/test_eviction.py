"""Victims: enough, none needless, or None. Busy components stay, within a bound."""

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapd.core import foresight
from swapd.core.eviction import quantum_s, stays_until
from swapd.core.families import room_to_keep, spread
from swapd.core.ledger import Ledger
from swapd.core.lru import IdleOrder
from swapd.core.records import Component, Rules
from swapd.core.states import State

IDLE = st.lists(st.integers(0, 12), max_size=8).map(
    lambda sizes: [(f"c{i}", chunks) for i, chunks in enumerate(sizes)]
)


def victims(need: int, idle: list[tuple[str, int]]) -> list[str] | None:
    chosen = foresight.victims(need, [foresight.Candidate(*one) for one in idle])
    return None if chosen is None else [one.name for one in chosen]


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


def component(name: str = "a", **given: Any) -> Component:
    c = Component(1, name, 1, 1, 1, "lru", None, False, state=State.RESIDENT)
    for attribute, value in given.items():
        setattr(c, attribute, value)
    return c


@given(st.lists(st.tuples(st.sampled_from(["", "f", "g"]), st.integers(0, 5))))
def test_each_has_its_turn_and_families_stay_together(of: list[tuple[str, int]]) -> None:
    idle = IdleOrder()
    parts = [component(f"c{i}", part_of=f, idle_since=float(at)) for i, (f, at) in enumerate(of)]
    idle.use("g")
    for c in parts:
        idle.add(c)
    order = list(idle)
    assert sorted(c.name for c in order) == sorted(c.name for c in parts)
    single = [c.idle_since for c in order if not c.part_of]
    assert single == sorted(single), "the least recently used goes first"
    for family in ("f", "g"):
        own = [c for c in order if c.part_of == family]
        assert own == sorted(own, key=lambda c: (c.idle_since, parts.index(c)), reverse=True)
        first = order.index(own[0]) if own else 0
        assert order[first : first + len(own)] == own
        for other in (c for c in order if c.part_of not in (family, "g")):
            before = family == "g" or other.idle_since < max((c.idle_since for c in own), default=0)
            assert not (own and before) or order.index(other) < first
    for c in parts:
        idle.drop(c)
    assert not list(idle)


def ledger(factor: float = 8.0, bound_s: float = 2.0) -> Ledger:
    return Ledger(10, 1, Rules(residency_factor=factor, residency_bound_s=bound_s))


def test_the_quantum_is_a_multiple_of_the_swap_in_time_within_a_bound() -> None:
    assert quantum_s(ledger(), component(swap_in_s=0.1), 0, 0.0) == pytest.approx(0.8)
    assert quantum_s(ledger(), component(swap_in_s=1.0), 0, 0.0) == 2.0
    assert quantum_s(ledger(factor=0.0), component(swap_in_s=1.0), 0, 0.0) == 0.0


def until(gap_s: float | None, idle_since: float, factor: float = 8.0) -> float:
    c = component(resident_since=100.0, idle_since=idle_since, swap_in_s=0.2, gap_s=gap_s)
    return stays_until(ledger(factor, bound_s=1.0), c, 0, 0.0)


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
    assert spread([10] * 8, room) == kept


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(-10, 300))
def test_what_is_kept_fits(sizes: list[int], room: int) -> None:
    kept = spread(sizes, room)
    assert sum(sizes[i] for i in kept) <= max(room, 0)
    if sum(sizes) <= room:
        assert len(kept) == len(sizes)


@given(st.integers(1, 60), st.integers(0, 60))
def test_between_kept_parts_of_one_size_are_as_many_as_anywhere(parts: int, room: int) -> None:
    kept = sorted(spread([1] * parts, room))
    assert len(kept) == min(parts, room)
    gaps = [b - a for a, b in pairwise(kept)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_two_of_the_largest_have_room_beside_what_is_kept() -> None:
    assert room_to_keep([3, 4, 5], 12, 2) == 12, "all of it fits, so nothing is copied"
    assert room_to_keep([3, 4, 5], 11, 2) == 1
    assert room_to_keep([], 11, 2) == 11
