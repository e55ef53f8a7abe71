"""`swapd replay` runs a recorded run again, and says what other settings would have come to;
`swapd plan --from-log` says with which of them it would wait less."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from swapd.log.reader import read
from swapd.shared import config

from .conftest import log_of_turns, on_terminal, swapd


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return log_of_turns(tmp_path_factory.mktemp("run"))


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


# --- the best of them --------------------------------------------------------------------


def planned(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(swapd("plan", "--from-log", *words, "--json").stdout)
    return found


def test_settings_that_load_less_are_printed_as_the_daemon_reads_them(recorded: Path) -> None:
    found = planned(recorded)
    happened, again, best = found["rows"]
    assert (happened["what"], again["what"]) == ("what happened", "as recorded")
    assert best["loads"] < again["loads"]
    assert best["wait_mean_s"] < again["wait_mean_s"]
    assert best["bytes_in"] >= best["fewest_bytes_in"]
    pasted = found["best"]
    assert pasted["settings"] or pasted["commands"]
    config.parsed(tomllib.loads("\n".join(pasted["settings"])), "")
    assert all(line.split()[1] in ("pin", "resize") for line in pasted["commands"])
    saved, tried = found["notes"]
    assert saved.startswith("saved: ")
    assert "settings tried" in tried


def test_a_budget_that_holds_all_needs_no_other_setting(recorded: Path) -> None:
    found = planned(recorded, "--budget", "1GiB", "--bandwidth", "1GB/s")
    assert found["best"] == {"budget": "1 GiB", "settings": ['budget = "1GiB"'], "commands": []}
    assert found["rows"][-1]["loads"] == 3
    shown = swapd("plan", "--from-log", recorded, "--budget", "1GiB").stdout
    assert '# at 1 GiB\n# in the daemon\'s configuration file:\nbudget = "1GiB"\n' in shown
    assert "fewest" in shown


def test_a_budget_that_is_too_small_says_so_in_place_of_savings(recorded: Path) -> None:
    found = planned(recorded, "--budget", "4MiB")
    assert found["rows"][-1]["refused"] > 0
    assert found["notes"][0].endswith("are refused or wait for ever: give more memory")


def test_a_log_that_cannot_be_planned_from_is_named_with_what_to_do(
    recorded: Path, tmp_path: Path
) -> None:
    def refused(*words: object, status: int = 1) -> str:
        return swapd("plan", "--from-log", *words, status=status).stderr

    log = tmp_path / "log.jsonl"
    assert "No such file" in refused(log)
    log.write_text("")
    assert "no run from its start: it is empty, or was rotated" in refused(log)
    lines = recorded.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0].replace(b'"schema":1', b'"schema":0'))
    assert "read it with the version that wrote it" in refused(log)
    log.write_bytes(b"".join(lines[:5]))
    assert "let its stages work" in refused(log)
    assert "less than one chunk" in refused(recorded, "--budget", "1", status=2)
    given = ("--device-memory", "1GiB", "--passes", "a=2", "--isolation", "strict", "--kv-cache", 0)
    assert "--device-memory, --isolation, --kv-cache, --passes has no effect with" in refused(
        recorded, *given
    )
    assert "--bandwidth" in refused(recorded, "--bandwidth", "fast", status=2)
    said = swapd("plan", "a=1GiB", "--budget", "1GiB", status=1).stderr
    assert "--budget goes with --from-log" in said


def test_a_log_that_ends_in_the_middle_is_planned_from(recorded: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    whole = recorded.read_bytes()
    log.write_bytes(whole[: len(whole) * 2 // 3])
    assert len(read(log)) < len(read(recorded))
    assert planned(log, "--budget", "1GiB")["rows"][0]["acquires"] > 6
