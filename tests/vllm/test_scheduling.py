"""vLLM's scheduler and a lost KV cache, with steps that run ahead and without."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import Nursery

#: The tokens of each request in `scheduling`: the numbers after its prompt.
ALL = list(range(40, 64))


#: Steps before which the cache is lost, and steps that compute on others' memory.
LOST_BEFORE: tuple[list[int], ...] = ([], [2], [7], [5, 6], [5, 8, 9, 20])
FENCED_IN: tuple[list[int], ...] = ([1], [2], [7], [5, 6], [5, 9, 20])
SWITCHES = (False, True)


@pytest.fixture(scope="module")
def said(models: Path, nursery: Nursery) -> dict[str, Any]:
    """What `scheduling.said` returns for each case, by the case; one process answers all."""
    steps = [*((lost, []) for lost in LOST_BEFORE), *(([], fenced) for fenced in FENCED_IN)]
    cases = [[ahead, prefixes, *one] for ahead, prefixes, one in product(SWITCHES, SWITCHES, steps)]
    found = nursery.call("tests.vllm.scheduling:said_of_each", str(models / "talker"), cases)
    return dict(zip(map(str, cases), found, strict=True))


@pytest.mark.parametrize("lost_before", LOST_BEFORE)
@pytest.mark.parametrize("prefixes", SWITCHES)
@pytest.mark.parametrize("ahead", SWITCHES)
def test_each_token_comes_once_and_none_was_computed_from_nothing(
    said: dict[str, Any], *, ahead: bool, prefixes: bool, lost_before: list[int]
) -> None:
    got, losses, void = said[str([ahead, prefixes, lost_before, []])]
    assert got == {"a": ALL, "b": ALL}
    assert losses == len(lost_before)
    assert losses <= void <= losses * (1 + ahead), "each loss costs a step, and what runs ahead"


@pytest.mark.parametrize("fenced_in", FENCED_IN)
@pytest.mark.parametrize("prefixes", SWITCHES)
@pytest.mark.parametrize("ahead", SWITCHES)
def test_a_step_on_others_memory_is_computed_again_with_those_that_ran_ahead(
    said: dict[str, Any], *, ahead: bool, prefixes: bool, fenced_in: list[int]
) -> None:
    """The next step has begun before this is known, and has read its output."""
    got, _, void = said[str([ahead, prefixes, [], fenced_in])]
    assert got == {"a": ALL, "b": ALL}
    assert void >= len(fenced_in)


def test_a_stage_that_cannot_count_its_chunks_is_told_the_setting(nursery: Nursery) -> None:
    said = nursery.call("tests.vllm.scheduling:streams")
    why = "talker streams, but gives way between requests only; to give way inside of them: "
    assert said == {
        "uni": [f"{why}leave out model_runner: v2"],
        "mp": [f"{why}set distributed_executor_backend: uni"],
        "no chunks": [],
    }


@pytest.mark.parametrize("prefixes", [False, True])
def test_vllms_own_scheduler_computes_again_what_was_in_blocks_that_are_gone(
    models: Path, nursery: Nursery, *, prefixes: bool
) -> None:
    histories = nursery.call(
        "tests.vllm.scheduling:said_by_vllms_own", str(models / "talker"), prefixes, [*range(40)]
    )
    for got, prompts, _ in histories:
        assert got == {name: [*range(long, long + 24)] for name, long in prompts.items()}
    assert sum(void for *_, void in histories) > len(histories)
