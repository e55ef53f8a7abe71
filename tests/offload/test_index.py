"""README.md names the tests of each case: each case has its line, and the tests exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent
LINES = (HERE / "README.md").read_text().splitlines()


def test_every_case_has_its_line() -> None:
    numbers = [int(match[1]) for line in LINES if (match := re.match(r"\| (\d+) \|", line))]
    assert numbers == list(range(1, 52))


def test_every_test_that_is_named_is_there() -> None:
    named = [found for line in LINES for found in re.findall(r"`([\w/]+\.py)::(\w+)`", line)]
    assert len(named) > 51
    for file, test in named:
        path = HERE / file if "/" not in file else HERE.parent / file
        assert re.search(rf"^(async )?def {test}\(", path.read_text(), re.MULTILINE), (file, test)
