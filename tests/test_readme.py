"""The programs of the first pages run unchanged, and the map names existing files."""

import re
from pathlib import Path

import pytest

from swapd import spawn
from tests.processes import output_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CALLS = (ROOT / "docs" / "calls.md").read_text()


PROGRAMS = re.findall(r"```python\n(.*?)```", README + CALLS, re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=["first page", "attach", "by hand"])
def test_the_quick_start_runs_as_printed(program: str) -> None:
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    with spawn.daemon(budget="256MiB") as daemon:
        said = output_of(program, env={"SWAPD_ENDPOINT": str(daemon.folder)})
    assert said == "5 evictions, 0 bytes copied back\n"


def test_the_readme_is_one_page() -> None:
    assert len(README.splitlines()) < 200


def test_the_map_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "map.md").read_text()
    (tree,) = re.findall(r"## Files\n\n```\n(.*?)```", page, re.DOTALL)
    tops = [ROOT / top for top in ("swapd", "client", "docs")]
    there = {path.name for top in tops for path in top.rglob("*.py")}
    assert set(re.findall(r"[a-z_]+\.py", tree)) <= there
