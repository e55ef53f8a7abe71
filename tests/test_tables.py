"""The tests, and the sections and rows of `make gpu-check`, that pages name exist."""

import ast
import re
from pathlib import Path

import pytest

from benchmarks.gpu_check import plan
from tests.processes import ROOT

#: The folders of the tests that the page on vLLM names.
FOLDERS = ("tests/vllm", "tests/plugin")
SECTIONS = {section.module: section for section in plan.SECTIONS}


def functions(name: str) -> set[str]:
    """The functions of the test files of that name."""
    files = [ROOT / folder / name for folder in FOLDERS if (ROOT / folder / name).exists()]
    trees = [ast.parse(file.read_text()) for file in files]
    return {one.name for tree in trees for one in tree.body if isinstance(one, ast.FunctionDef)}


def table(page: Path, heading: str) -> list[str]:
    """The rows of a table under a heading, without its first two."""
    said = page.read_text().partition(heading)[2].partition("\n## ")[0]
    return [line for line in said.splitlines() if line.startswith("| ")][2:]


MOVES = table(ROOT / "tests" / "vllm" / "README.md", "## What moves on a GPU")


@pytest.mark.parametrize("row", MOVES, ids=lambda row: row.split("|")[1].strip()[:30])
def test_what_shows_that_weights_move_or_stay_is_there(row: str) -> None:
    shown = row.rstrip(" |").rpartition("|")[2]
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", shown)
    assert named, "each row has a test"
    for file, test in named:
        assert test in functions(file), f"{file} has no {test}"
    _, _, sections = shown.partition("gpu-check ")
    assert set(re.findall(r"`(\w+)`", sections)) <= set(SECTIONS)
    assert sections or "read only" in shown, "what has no section of gpu-check is said to have none"


def test_the_page_has_all_that_a_gpu_does_otherwise() -> None:
    said = "\n".join(MOVES)
    for what in ("fp8", "Marlin", "LoRA", "KV scales", "drafters", "encoders", "async", "MLA"):
        assert what in said
    assert "Mamba" in said
