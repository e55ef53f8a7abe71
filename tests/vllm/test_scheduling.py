"""vLLM's scheduler and a lost KV cache, with steps that run ahead and without."""

from pathlib import Path

import pytest

from tests.vllm.engines import Nursery

#: The tokens of each request in `scheduling`: the numbers after its prompt.
ALL = list(range(40, 64))


@pytest.mark.parametrize("lost_before", [[], [2], [7], [5, 6], [5, 8, 9, 20]])
@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_each_token_comes_once_and_none_was_computed_from_nothing(
    models: Path, nursery: Nursery, *, ahead: bool, prefixes: bool, lost_before: list[int]
) -> None:
    got, losses, void = nursery.call(
        "tests.vllm.scheduling:said", str(models / "talker"), ahead, prefixes, lost_before
    )
    assert got == {"a": ALL, "b": ALL}
    assert losses == len(lost_before)
    assert losses <= void <= losses * (1 + ahead), "each loss costs a step, and what runs ahead"


@pytest.mark.parametrize("fenced_in", [[1], [2], [7], [5, 6], [5, 9, 20]])
@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_on_others_memory_is_computed_again_with_those_that_ran_ahead(
    models: Path, nursery: Nursery, *, ahead: bool, prefixes: bool, fenced_in: list[int]
) -> None:
    """The next step has begun before this is known, and has read its output."""
    got, _, void = nursery.call(
        "tests.vllm.scheduling:said", str(models / "talker"), ahead, prefixes, [], fenced_in
    )
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
