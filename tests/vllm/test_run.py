"""`swapd run -- vllm serve MODEL`: a real server that shares its device, by one command."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm import servers
from tests.vllm.engines import TAIL_CHARS

COMPLETES = Path(__file__).parents[1] / "programs" / "completes.py"


def test_a_server_of_vllm_is_measured_without_swapd_and_with_it(
    models: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("compare")
    servers.write(folder, models)
    load = shlex.join([sys.executable, str(COMPLETES), str(tmp_path / "s"), "thinker"])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "swapd", "run", "--compare", "--until", load, "--"),
            *servers.command(folder, tmp_path / "s"),
        ],
        env=servers.of_its_own(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-TAIL_CHARS:]
    assert done.stdout.count("completed 8\n") == 2, "one on each side"
    table = {line[:24].strip(): line[24:].split() for line in done.stdout.splitlines()}
    for row in ("whole time", "until it was ready", "the load", "host memory, at most"):
        assert len(table[row]) == 5, "two values with units, and a ratio"
    assert float(table["swaps"][0]) >= 1
    assert "the better settings (" in done.stderr
