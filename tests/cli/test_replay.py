"""`swapd replay` runs a recorded run again, and says what other settings would have come to."""

import json
from pathlib import Path

import pytest

from .conftest import log_of_turns, on_terminal, swapd


@pytest.fixture
def recorded(folder: Path) -> Path:
    return log_of_turns(folder)


def test_the_same_settings_load_as_often_and_others_are_beside_them(recorded: Path) -> None:
    words = ("replay", "--file", recorded, "--json")
    happened, again = json.loads(swapd(*words).stdout)
    assert (happened["what"], again["what"]) == ("what happened", "as recorded")
    for name in ("loads", "evictions", "bytes_in", "acquires"):
        assert again[name] == happened[name] > 0
    *_, other = json.loads(swapd(*words, "--eviction", "next_use").stdout)
    assert other["what"] == "eviction next_use"
    assert other["loads"] < happened["loads"]
    assert happened["fewest_bytes_in"] <= other["fewest_bytes_in"] <= other["bytes_in"]
    assert happened["fewest_is_exact"]
    *_, other = json.loads(swapd(*words, "--budget", "1GiB", "--bandwidth", "1GB/s").stdout)
    assert other["loads"] == 3
    assert other["what"] == "budget 1 GiB, 1 GB/s"


def test_on_a_terminal_a_table(recorded: Path) -> None:
    text = on_terminal("replay", "--file", recorded, "--overtake", 3)
    for words in ("what happened", "as recorded", "overtake 3", "fewest", "longest"):
        assert words in text


def test_a_log_without_its_start_is_named_with_what_to_do(recorded: Path, tmp_path: Path) -> None:
    lines = recorded.read_bytes().splitlines(keepends=True)
    rotated = tmp_path / "rotated.jsonl"
    rotated.write_bytes(b"".join(lines[5:]))
    assert "no run from its start" in swapd("replay", "--file", rotated, status=1).stderr
    rotated.write_bytes(b"".join([*lines[:20], *lines[24:]]))
    assert "is missing" in swapd("replay", "--file", rotated, status=1).stderr
    rotated.write_bytes(b"".join(lines)[: len(b"".join(lines)) * 2 // 3])
    assert json.loads(swapd("replay", "--file", rotated, "--json").stdout)
    said = swapd("replay", "--file", recorded, "--budget", "1", status=2).stderr
    assert "less than one chunk" in said
