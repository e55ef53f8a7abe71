"""A stage that reads weights outside of its turn says so before it dies, unless told not to."""

import signal

import pytest

from swapd import spawn
from tests.processes import run_python

STAGE = """
import ctypes, sys
from swapd_client.vllm.options import options_of
from swapd_client.vllm.stage import Stage
given = {"endpoint": sys.argv[1]} | ({"faults": sys.argv[2]} if sys.argv[2] else {})
stage = Stage.connect(options_of({"swapd": given}, "thinker"), "thinker", gpu=None)
part = stage.client.register("thinker", {"x": bytes(100)})
ctypes.string_at(part.address, 8)
"""


@pytest.mark.parametrize(
    ("faults", "explained"), [("", True), ("explain", True), ("silent", False)]
)
def test_a_stage_explains_its_faults(faults: str, explained: bool) -> None:
    with spawn.daemon(budget="64MiB", isolation="strict") as daemon:
        done = run_python(STAGE, daemon.folder, faults)
    assert done.returncode == -signal.SIGSEGV
    assert ("swapd: a fault in component 'thinker'" in done.stderr) == explained
