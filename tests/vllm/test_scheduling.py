"""What vLLM's scheduler makes of a lost KV cache, with steps that run ahead and without."""

from pathlib import Path

import pytest

from tests.vllm.engines import Nursery

#: Of each request, in `scheduling`: its tokens are numbered.
ALL = list(range(24))


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
