"""The workspace of a loading stage is free again before vLLM measures the GPU's free memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fakecuda
from tests.cuda.gpu_world import MIB, PROGRAM, World
from tests.guarantees import harness
from tests.processes import output_of

BUDGET = 16 * MIB


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with fakecuda.shown(monkeypatch, total=128 * MIB) as fake, harness.world(PROGRAM) as made:
        yield World(made, fake)


def test_loading_ends_when_the_memory_is_back(world: World) -> None:
    daemon = world.daemon(budget=BUDGET)
    before = daemon.status().device_free_bytes
    # the driver frees it with a delay: it refuses the first chunks that swapd allocates
    world.fake.faults(f"cuMemCreate 2 times=3 pid={daemon.pid}")
    program = Path(__file__).parent / "programs" / "stage.py"
    said = output_of(program, "load", daemon.folder, 12 * MIB, env=world.fake.environment())
    during, after = map(int, said.split())
    assert (during, after) == (before + 12 * MIB, before)
