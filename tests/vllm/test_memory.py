"""An arena of the size in the stages' files is enough, and at most a chunk a part too large."""

from pathlib import Path

import pytest

from benchmarks.vllm import memory
from tests.vllm.engines import Nursery, scene
from tests.vllm.models import THIRD


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, models: Path, deep: Path, nursery: Nursery
) -> Path:
    made = tmp_path_factory.mktemp("sizes")
    for model in (*models.iterdir(), *deep.iterdir()):
        (made / model.name).symlink_to(model)
    nursery.call("tests.vllm.models:write_all", str(made), *THIRD)
    return made


@pytest.mark.parametrize("stages", memory.STAGES, ids=lambda stages: f"{len(stages)} stages")
def test_stages_need_what_stays_and_the_largest_turn(
    folder: Path, nursery: Nursery, stages: dict[str, dict[str, object]]
) -> None:
    with scene(folder, nursery) as made:
        needs = memory.of(made, stages)
    assert needs.computed <= needs.least <= needs.computed + needs.rounding
    assert needs.peak <= needs.least < needs.together
