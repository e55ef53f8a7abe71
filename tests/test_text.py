"""Text from others is harmless where people read it."""

import json

import pytest

from swapd.shared.text import (
    TEXT_MAX_CHARS,
    plain,
    plain_json,
    plain_lines,
    problem_with_text,
    reason,
)

#: Clears a screen; forges a line; the same in one byte; reverses text; is no character.
EVIL = ["\x1b[2J", "a\nb", "\r", "\x00", "\x7f", "\x9b2J", "\u202egnp.exe", "\u2028", "\udcff"]


@pytest.mark.parametrize("text", ["", "talker", "größe 名前", "a" * TEXT_MAX_CHARS])
def test_what_can_be_printed_stays_as_it_is(text: str) -> None:
    assert plain(text) == plain_lines(text) == text
    assert problem_with_text("it", text) is None


@pytest.mark.parametrize("text", EVIL)
def test_what_cannot_be_printed_is_escaped_and_refused(text: str) -> None:
    assert plain(f"<{text}>").isprintable()
    assert plain(f"<{text}>") == f"<{plain(text)}>"
    assert plain(text) != text
    problem = problem_with_text("the label", text)
    assert problem is not None
    assert problem.startswith("the label is ")
    assert problem.isprintable()


def test_what_is_escaped_reads_as_python_writes_it() -> None:
    assert plain("\x1b[2J\n\u202e\udcff") == r"\x1b[2J\n\u202e\udcff"


def test_what_is_too_long_is_refused_with_its_length() -> None:
    problem = problem_with_text("group", "x" * (TEXT_MAX_CHARS + 1))
    assert problem == f"group has {TEXT_MAX_CHARS + 1} characters; at most {TEXT_MAX_CHARS}"


def test_lines_stay_lines() -> None:
    assert plain_lines("a\x1b\nb\r\n") == "a\\x1b\nb\\r\n"


@pytest.mark.parametrize("text", [*EVIL, "\U000e0041", "größe\n\t\x85", "plain"])
def test_json_means_the_same_and_is_harmless(text: str) -> None:
    written = json.dumps({"a": [text, 1]}, ensure_ascii=False, indent=2)
    shown = plain_json(written)
    assert json.loads(shown) == json.loads(written)
    assert shown.replace("\n", "").isprintable()


def test_a_reason_is_short_and_in_one_line() -> None:
    said = reason(ValueError("\x1b\n" + "x" * 100_000))
    assert said.isprintable()
    assert len(said) < 500
    assert reason(ValueError("short")) == "short"
