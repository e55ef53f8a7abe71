"""Pages and help texts are in plain English, and the checker finds violations."""

import pytest

from tests.prose import EXCEPTIONS, problems, sentences, texts


@pytest.fixture(scope="module")
def prose() -> dict[str, str]:
    """All of it, read in the one worker of a run that needs it."""
    return texts()


@pytest.mark.parametrize(
    ("sentence", "problem"),
    [
        ("What hooks do can be done by hand.", "headless 'what'"),
        ("It drops what was there.", "headless 'what'"),
        ("Of what stays it keeps a part.", "headless 'what'"),
        ("The log says what was evicted, and what to do.", None),
        ("Whoever holds a descriptor cannot write.", "headless 'who'"),
        ("A process, who holds nothing.", "headless 'who'"),
        ("Who starts the daemon?", None),
        ("It is loaded when it is used.", "chain of passives"),
        ("A session loads it. It is evicted. It is told.", None),
        ("It is loaded; another is evicted.", None),
        ("Its masters are sealed.", "project's own"),
        ("word " * 41, "over 40 words"),
        ("`what is` and `masters` are code:\n\n```\nWhat is.\n```", None),
    ],
)
def test_each_rule_finds_its_sentences_and_no_others(sentence: str, problem: str | None) -> None:
    found = list(problems(sentence))
    assert len(found) == (problem is not None), found
    assert problem is None or problem in found[0]


def test_headings_items_cells_and_links_are_sentences() -> None:
    page = "# A b\n\n- c [d](e.md)\n  f\n- g. H\n\n| i | j |\n| --- | --- |\n| k. L | m |\n"
    assert [s for s in sentences(page) if s.strip("- ")] == [
        *("A b", "c d f", "g.", "H", "i", "j", "k.", "L", "m")
    ]


def test_pages_and_code_are_in_plain_english(prose: dict[str, str]) -> None:
    assert [f"{name}: {one}" for name, text in prose.items() for one in problems(text)] == []


def test_every_exception_is_needed(prose: dict[str, str]) -> None:
    for excepted in EXCEPTIONS:
        assert any(excepted in text for text in prose.values()), excepted
