"""The expected order of a pass is that of the last one, not of this one."""

from collections.abc import Sequence

import pytest

from swapd_client.offload.stream import Order


def play(order: Order, seen: Sequence[int]) -> list[int | None]:
    """A pass that uses these: the expectations before each of them, and after the last."""
    expected = order.expected()
    nexts = []
    for part in seen:
        nexts.append(next(iter(expected.coming), None))
        expected.used(part)
    nexts.append(next(iter(expected.coming), None))
    order.learn(seen)
    return nexts


def test_at_first_the_order_is_as_declared() -> None:
    assert play(Order(4), [0, 1, 2, 3]) == [0, 1, 2, 3, None]


@pytest.mark.parametrize("seen", [[3, 1, 0, 2], [0, 0, 1, 1], [0, 1, 0, 1, 2], [2], [5, 1]])
def test_a_second_pass_is_expected_to_be_as_the_first(seen: list[int]) -> None:
    order = Order(6)
    play(order, seen)
    assert play(order, seen) == [*seen, None]


def test_who_skips_some_is_followed() -> None:
    order = Order(6)
    assert play(order, [0, 4, 5]) == [0, 1, 5, None]


def test_a_pass_that_is_whole_again_is_known() -> None:
    order = Order(6)
    play(order, [0, 5])
    assert play(order, [0, 1, 2, 3, 4, 5]) == [0, 5, 2, 3, 4, 5, None]
    assert order.expected().order == (0, 1, 2, 3, 4, 5)


def test_a_pass_that_ends_early_teaches_nothing() -> None:
    order = Order(4)
    play(order, [0, 2, 1, 3])
    for seen in ([0, 2], [], [0]):
        play(order, seen)
        assert order.expected().order == (0, 2, 1, 3)


def test_what_was_never_seen_is_followed_by_nothing() -> None:
    order = Order(2)
    play(order, [1])
    assert play(order, [7, 1]) == [1, 1, None]
    assert play(order, [7, 1]) == [7, 1, None]


def test_one_that_came_too_late_is_found_where_it_belongs() -> None:
    assert play(Order(4), [0, 2, 1, 2, 3]) == [0, 1, 3, 2, 3, None]
