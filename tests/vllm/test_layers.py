"""Two real engines of many layers that nearly fit together: a turn takes no more than it needs."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from swapd.shared import vm
from tests.vllm.engines import (
    MIB,
    REQUESTS,
    TOKENS,
    Nursery,
    Scene,
    by_component,
    on_swapd,
    scene,
)
from tests.vllm.models import DEEP

Expected = Mapping[str, list[list[list[int]]]]

#: A little less than the weights of both; and, where they take turns, for a KV cache of each.
BUDGET = 248 * MIB
CACHE = 32 * MIB


@pytest.fixture
def place(deep: Path, nursery: Nursery) -> Iterator[Scene]:
    with scene(deep, nursery) as made:
        yield made


@pytest.mark.parametrize(
    ("cache", "budget", "prefixes"),
    [
        pytest.param(0, BUDGET, False, id="weights"),
        pytest.param(CACHE, BUDGET, False, id="weights do not fit beside a cache"),
        pytest.param(CACHE, BUDGET, True, id="prefixes are cached"),
    ],
)
def test_of_a_stage_no_more_leaves_than_another_needs(
    place: Scene, expected_deep: Expected, *, cache: int, budget: int, prefixes: bool
) -> None:
    of_cache: dict[str, object] = {"enable_prefix_caching": prefixes}
    of_cache |= {"kv_cache_memory_bytes": cache} if cache else {}
    daemon = place.daemon(budget=budget)
    settings = {"kv": "auto"} if cache else {}
    engines = place.start(
        *(on_swapd(place.models / name, daemon.folder, settings, **of_cache) for name in DEEP)
    )
    for number, prompts in enumerate(REQUESTS):
        before = daemon.status()
        for engine in engines:
            assert engine.generate(prompts, TOKENS) == expected_deep[engine.label][number]
            engine.step(1)  # of nothing: as a server's engine does, it says that the request ended
        after = daemon.status()
        copied = after.bytes_in - before.bytes_in + after.bytes_out - before.bytes_out
        of = {
            name: [vm.round_up(one.nbytes, before.chunk_bytes) for one in parts]
            for name, parts in by_component(daemon).items()
        }
        assert of.keys() == {*DEEP, *(f"{name}.kv" for name in DEEP if cache)}
        assert min(len(of[name]) for name in DEEP) > 2
        parts = sum(max(of[name]) for name in DEEP)
        lacking = sum(map(sum, of.values())) - budget
        # a cache without contents leaves and comes back without a copy
        weights = sum(sum(of[name]) for name in DEEP) - budget
        beside = sum(max(weights + sum(of.get(f"{name}.kv", [])), 0) for name in DEEP)
        if number:  # the first round has the evictions of loading
            assert copied <= 2 * lacking + parts
            if not prefixes:
                assert copied <= (beside and beside + parts)
                assert copied or not beside
    status = daemon.status()
    if not prefixes:
        assert status.bytes_out == 0
    assert status.peak_bytes <= status.budget_bytes
