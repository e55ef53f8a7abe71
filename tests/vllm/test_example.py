"""examples/vllm_stage.py runs unchanged, and prints the promised output."""

import re
import subprocess
import sys
from pathlib import Path

from swapd import spawn
from tests.vllm.environment import environment

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "vllm_stage.py"


def test_the_engine_of_the_example_gives_way_and_answers_the_same(models: Path) -> None:
    with spawn.daemon(budget="192MiB") as daemon:
        done = subprocess.run(
            [sys.executable, EXAMPLE, models / "thinker", "192MiB"],
            env=environment(SWAPD_ENDPOINT=str(daemon.folder)),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    # among the log lines of vLLM
    assert re.search(r"^the same tokens \[.*\]$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^[1-9]\d* evictions, 0 bytes copied back$", done.stdout, re.MULTILINE)
