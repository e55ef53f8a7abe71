"""Two real engines of many layers that nearly fit together: a turn takes no more than it needs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from swapd.shared import vm
from tests.vllm.engines import REQUESTS, TOKENS, Nursery, Scene, by_component, scene
from tests.vllm.models import DEEP

#: A little less than the weights of both.
BUDGET = "248MiB"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Path:
    """A folder of the models."""
    folder = tmp_path_factory.mktemp("deep")
    nursery.call("tests.vllm.models:write_all", str(folder), *DEEP)
    return folder


@pytest.fixture
def place(deep: Path, nursery: Nursery) -> Iterator[Scene]:
    with scene(deep, nursery) as made:
        yield made


def test_of_a_stage_no_more_leaves_than_another_needs(place: Scene) -> None:
    expected = {
        engine.label: [engine.generate(prompts, TOKENS) for prompts in REQUESTS]
        for engine in place.plain(*DEEP)
    }
    daemon = place.daemon(budget=BUDGET)
    engines = place.on_swapd(daemon, *DEEP)
    for number, prompts in enumerate(REQUESTS):
        before = daemon.status()
        for engine in engines:
            assert engine.generate(prompts, TOKENS) == expected[engine.label][number]
        copied = daemon.status().bytes_in - before.bytes_in
        of = {
            name: [vm.round_up(one.nbytes, before.chunk_bytes) for one in parts]
            for name, parts in by_component(daemon).items()
        }
        assert of.keys() == DEEP.keys()
        assert min(map(len, of.values())) > 2
        lacking = sum(map(sum, of.values())) - before.budget_bytes
        assert copied > 0
        if number:  # until then there is what loading has evicted
            assert copied <= 2 * lacking + sum(map(max, of.values()))
    status = daemon.status()
    assert status.bytes_out == 0
    assert status.peak_bytes <= status.budget_bytes
