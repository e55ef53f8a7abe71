"""A stage that reads weights outside of its turn explains the fault before it dies, by default."""

import signal
from pathlib import Path

import pytest

from swapd import spawn
from tests.processes import run_python

STAGE = Path(__file__).parent / "programs" / "stage.py"


@pytest.mark.parametrize(
    ("faults", "explained"), [("", True), ("explain", True), ("silent", False)]
)
def test_a_stage_explains_its_faults(faults: str, explained: bool) -> None:
    with spawn.daemon(budget="64MiB", isolation="strict") as daemon:
        done = run_python(STAGE, "read_out_of_turn", daemon.folder, faults)
    assert done.returncode == -signal.SIGSEGV
    assert ("swapd: a fault in component 'thinker'" in done.stderr) == explained
