"""The part of the zoo that `make test` runs: the oddest classes. `make zoo` runs all."""

import re

import pytest

from tests.offload.nursery import strict_daemon
from tests.offload.zoo.entries import FAMILIES, all_entries
from tests.offload.zoo.keeper import Keeper
from tests.offload.zoo.table import problems_of, written

OFTEN = [one for one in all_entries() if one.often]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_holds_or_says_why_it_does_not() -> None:
    """One process has the libraries of all families, which take longer than most classes."""
    with Keeper(FAMILIES) as keeper, strict_daemon("8MiB") as daemon:
        rows = [keeper.run(entry, daemon.folder) for entry in OFTEN]
    assert problems_of(rows) == [], [row.printed for row in rows if row.problems()]


def test_the_page_has_a_line_for_each_class() -> None:
    lines = re.findall(r"^\| (.+?) \| (.+?) \|", written(), re.MULTILINE)
    there = {name: oddity for name, oddity in lines if name not in ("class", "---")}
    assert there == {one.name: one.oddity for one in all_entries()}


def test_no_line_of_the_page_dies_without_words() -> None:
    died = re.findall(r"^\d+\. (died: .*)$", written(), re.MULTILINE)
    assert [text for text in died if "a fault in component" not in text] == []
