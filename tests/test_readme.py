"""The README's programs run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from swapd import spawn

README = (Path(__file__).parent.parent / "README.md").read_text()


PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["attach", "by hand"])
def test_the_quick_start_runs_as_printed(program: str) -> None:
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    with spawn.daemon(budget="256MiB") as daemon:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={"SWAPD_ENDPOINT": str(daemon.folder)},
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout == "5 evictions, 0 bytes copied back\n"


def test_the_map_names_files_that_exist() -> None:
    root = Path(__file__).parent.parent
    (tree,) = re.findall(r"## Map of the tree\n\n```\n(.*?)```", README, re.DOTALL)
    for name in re.findall(r"[a-z_]+\.py", tree):
        assert list(root.glob(f"swapd/**/{name}")) + list(root.glob(f"client/**/{name}")), name
