"""The settings say which stages come before and after a stage."""

import pytest

from swapd_client.errors import InvalidArgument
from swapd_client.vllm.neighbours import ALONE, Neighbours, among, in_order, neighbours_of
from swapd_client.vllm.options import Options, options_of

THREE = ("thinker", "talker", "code2wav")


@pytest.mark.parametrize(
    ("name", "after", "before"),
    [
        ("thinker", "talker", "code2wav"),
        ("talker", "code2wav", "thinker"),
        ("code2wav", "thinker", "talker"),
    ],
)
def test_after_the_last_stage_comes_the_first_again(name: str, after: str, before: str) -> None:
    assert in_order(THREE, name) == Neighbours((after,), (before,))


def test_of_two_stages_neither_goes_for_the_other() -> None:
    assert in_order(("a", "b"), "a") == Neighbours(("b",), ())


def test_one_stage_has_no_neighbours() -> None:
    assert in_order(("a",), "a") == ALONE
    assert in_order((), "a") == ALONE


def test_stages_may_come_after_several_and_before_several() -> None:
    """One thinker, two talkers, one code2wav; and a stage that is in no topology."""
    sources, names = {0: (), 1: (0,), 2: (0,), 3: (1, 2)}, {0: "a", 1: "b", 2: "c", 3: "d"}
    of = {stage: among(sources, names, stage) for stage in (*sources, 9)}
    assert of[0] == Neighbours(("b", "c"), ("d",))
    assert of[1] == Neighbours(("d",), ("a",))
    assert of[3] == Neighbours(("a",), ("b", "c"))
    assert among({}, {}, 9) == ALONE


def test_a_stage_that_its_order_does_not_name_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="thinker, talker, code2wav"):
        in_order(THREE, "vae")


def test_settings_go_before_what_vllm_says_and_vllm_alone_says_nothing() -> None:
    said = options_of({"swapd": {"order": list(THREE)}}, "stage 'talker'")
    assert neighbours_of(said, object(), "talker") == in_order(THREE, "talker")
    assert neighbours_of(Options(), object(), "talker") == ALONE
