"""The part of the zoo that `make test` runs: the oddest classes. `make zoo` runs all."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.offload.nursery import strict_daemon
from tests.offload.zoo.entries import FAMILIES, Entry, all_entries
from tests.offload.zoo.keeper import Keeper
from tests.offload.zoo.table import written

OFTEN = [one for one in all_entries() if one.often]


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    """With the libraries of all families."""
    with Keeper(FAMILIES) as keeper:
        yield keeper


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Of a daemon that holds the largest of them."""
    with strict_daemon("8MiB") as daemon:
        yield daemon.folder


@pytest.mark.parametrize("entry", OFTEN, ids=lambda one: one.name.replace(" ", "_"))
def test_it_holds_or_says_why_it_does_not(keeper: Keeper, folder: Path, entry: Entry) -> None:
    row = keeper.run(entry, folder)
    assert row.problems() == [], row.printed


def test_the_page_has_a_line_for_each_class() -> None:
    lines = re.findall(r"^\| (.+?) \| (.+?) \|", written(), re.MULTILINE)
    there = {name: oddity for name, oddity in lines if name not in ("class", "---")}
    assert there == {one.name: one.oddity for one in all_entries()}


def test_no_line_of_the_page_dies_without_words() -> None:
    died = re.findall(r"^\d+\. (died: .*)$", written(), re.MULTILINE)
    assert [text for text in died if "a fault in component" not in text] == []
