"""A stage that reads weights outside of its turn says so before it dies, unless told not to."""

import signal
import subprocess
import sys

import pytest

from swapd import spawn

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
        done = subprocess.run(
            [sys.executable, "-c", STAGE, str(daemon.folder), faults],
            capture_output=True,
            text=True,
        )
    assert done.returncode == -signal.SIGSEGV
    assert ("swapd: a fault in component 'thinker'" in done.stderr) == explained
