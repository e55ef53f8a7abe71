"""`swapd story`: one component's history, each thing under its cause."""

from pathlib import Path

import pytest

from .conftest import Running, json_lines, serve, swapd


@pytest.fixture
def journal(folder: Path) -> Path:
    """Two workers whose components do not fit together; then four uses in a row."""
    daemon = serve(folder)
    thinker = daemon.client("thinker-worker", thinker=12)
    talker = daemon.client("talker-worker", talker=8)
    with talker.acquire("talker"):
        pass
    with thinker.acquire("thinker"):
        pass
    for _ in range(5):
        with talker.acquire("talker"):
            pass
        talker.status()  # before it asks for anything else it says that it is done
    thinker.close()
    talker.close()
    daemon.stop()
    return daemon.journal


def _told(journal: Path, name: str, *flags: str) -> list[str]:
    return swapd("story", name, *flags, "--file", journal).stdout.splitlines()


def test_an_eviction_stands_under_what_caused_it(journal: Path) -> None:
    steps = json_lines(swapd("story", "talker", "--json", "--file", journal).stdout)
    (at,) = (i for i, s in enumerate(steps) if s["text"].startswith("evict talker"))
    evict = steps[at]
    assert evict["about"] is True
    assert evict["text"] == (
        "evict talker 8 MiB to make room for thinker, asked by thinker-worker (session 1)"
    )
    cause = next(s for s in steps[at::-1] if s["record"]["seq"] == evict["record"]["cause"])
    assert cause["depth"] == evict["depth"] - 1
    # the asking itself, unless the release came after it, or the residency was not yet over
    first = [s["text"] for s in steps[:at] if s["depth"] == 0][-1]
    assert first.startswith(("ask thinker", "release talker", "tick"))


def test_every_record_about_it_is_there_and_points_at_the_one_above(journal: Path) -> None:
    steps = json_lines(swapd("story", "thinker", "--json", "--file", journal).stdout)
    seqs = {s["record"]["seq"] for s in steps}
    for step in steps:
        assert (step["record"]["cause"] in seqs) == (step["depth"] > 0)
    named = [line for line in journal.read_text().splitlines() if '"name":"thinker"' in line]
    shown = {s["record"]["seq"] for s in steps}
    assert all(record["seq"] in shown for record in json_lines("\n".join(named)))


def test_the_readable_form_is_indented_under_the_cause(journal: Path) -> None:
    lines = _told(journal, "talker")
    assert lines[0].startswith("talker: ")
    assert lines[0].endswith("in 2x, out 1x")
    register = next(i for i, line in enumerate(lines) if "register talker" in line)
    assert "  └─ make talker a master of 8 MiB" in lines[register + 1]
    assert "     └─ master talker is made" in lines[register + 2]


def test_many_uses_in_a_row_are_one_line_unless_all_are_asked_for(journal: Path) -> None:
    folded = [line for line in _told(journal, "talker") if "uses without a copy" in line]
    assert len(folded) == 1
    assert "... 4 uses without a copy, from " in folded[0]
    everything = _told(journal, "talker", "--all")
    assert sum("hit talker" in line for line in everything) == 4


def test_an_unknown_name_says_so_with_the_near_ones(journal: Path) -> None:
    done = swapd("story", "talkr", "--file", journal, status=1)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "does not speak of 'talkr'; did you mean 'talker' or 'thinker'?" in line
    far = swapd("story", "zzz", "--file", journal, status=1).stderr
    assert "it speaks of talker, thinker" in far


def test_of_a_running_daemon(daemon: Running) -> None:
    daemon.client("worker", vae=2)
    assert "register vae 2 MiB, lru; by worker (session 1)" in (
        swapd("story", "vae", "-e", daemon.folder).stdout
    )


def test_no_daemon_is_one_clear_line(folder: Path) -> None:
    (line,) = swapd("story", "vae", "-e", folder, status=1).stderr.splitlines()
    assert line.startswith("swapd: no swapd at")
