"""A stage on a GPU: its daemon is that GPU's, and the workspace in which it loads is free again
before vLLM measures the free memory.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fakecuda
from tests.cuda.gpu_world import MIB, PROGRAM, World
from tests.guarantees import harness
from tests.processes import output_of, run_python

BUDGET = 16 * MIB
STAGE = Path(__file__).parent / "programs" / "stage.py"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with fakecuda.shown(monkeypatch, total=128 * MIB) as fake, harness.world(PROGRAM) as made:
        yield World(made, fake)


def test_loading_ends_when_the_memory_is_back(world: World) -> None:
    daemon = world.daemon(budget=BUDGET)
    before = daemon.status().device_free_bytes
    # the driver frees it with a delay: it refuses the first chunks that swapd allocates
    world.fake.faults(f"cuMemCreate 2 times=3 pid={daemon.pid}")
    said = output_of(STAGE, "load", daemon.folder, 12 * MIB, env=world.fake.environment())
    during, after = map(int, said.split())
    assert (during, after) == (before + 12 * MIB, before)


@pytest.mark.parametrize(
    ("device", "serves"), [("cuda:1", "this process's cuda:1"), ("host", "no GPU")]
)
def test_a_stage_refuses_the_daemon_of_another_device(
    monkeypatch: pytest.MonkeyPatch, device: str, serves: str
) -> None:
    """As with one $SWAPD_ENDPOINT for engines on two GPUs: the weights would be on the other."""
    gpus = fakecuda.shown(monkeypatch, total=128 * MIB, devices=2)
    with gpus as fake, harness.world(PROGRAM) as made:
        daemon = made.daemon(device=device, budget=BUDGET, chunk=2 * MIB)
        done = run_python(STAGE, "load", daemon.folder, 0, env=fake.environment())
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"NoEndpoint: s computes on cuda:0, and swapd at {daemon.folder} serves {serves}" in last
    assert "/run/swapd/gpu{gpu}" in last
