"""`swapd log NAME` shows one component's history, with each event below its cause."""

from pathlib import Path

import pytest

from swapd.core.events import SessionRequest
from swapd.log.records import Record, render
from swapd.shared.protocol import NAMES_SHOWN, Register
from tests.files import file_with

from .conftest import Running, json_lines, serve, swapd


@pytest.fixture
def swap_log(folder: Path) -> Path:
    """Two workers whose components do not fit together: one use, then five of the other's."""
    daemon = serve(folder)
    thinker = daemon.client("thinker-worker", thinker=12)
    talker = daemon.client("talker-worker", talker=8)
    talker.acquire("talker").release()
    with thinker.acquire("thinker"):
        pass
    for _ in range(5):
        talker.acquire("talker").release()
        talker.status()  # the client reports its release before any other request
    thinker.close()
    talker.close()
    daemon.stop()
    return daemon.swap_log


def _told(swap_log: Path, name: str, *flags: str) -> list[str]:
    return swapd("log", name, *flags, "--file", swap_log).stdout.splitlines()


def test_an_eviction_stands_under_what_caused_it(swap_log: Path) -> None:
    steps = json_lines(swapd("log", "talker", "--json", "--file", swap_log).stdout)
    (at,) = (i for i, s in enumerate(steps) if s["text"].startswith("evict talker"))
    evict = steps[at]
    assert evict["about"] is True
    assert evict["text"] == (
        "evict talker 8 MiB to make room for thinker, asked by thinker-worker (session 1)"
    )
    cause = next(s for s in steps[at::-1] if s["record"]["seq"] == evict["record"]["cause"])
    assert cause["depth"] == evict["depth"] - 1
    # the request itself, or a later release or end of a minimum residency
    first = [s["text"] for s in steps[:at] if s["depth"] == 0][-1]
    assert first.startswith(("ask thinker", "release talker", "tick"))


def test_every_record_about_it_is_there_and_points_at_the_one_above(swap_log: Path) -> None:
    steps = json_lines(swapd("log", "thinker", "--json", "--file", swap_log).stdout)
    seqs = {s["record"]["seq"] for s in steps}
    for step in steps:
        assert (step["record"]["cause"] in seqs) == (step["depth"] > 0)
    named = [line for line in swap_log.read_text().splitlines() if '"name":"thinker"' in line]
    shown = {s["record"]["seq"] for s in steps}
    assert all(record["seq"] in shown for record in json_lines("\n".join(named)))


def test_the_readable_form_is_indented_under_the_cause(swap_log: Path) -> None:
    lines = _told(swap_log, "talker")
    assert lines[0].startswith("talker: ")
    assert lines[0].endswith("in 2x, out 1x")
    register = next(i for i, line in enumerate(lines) if "register talker" in line)
    assert "  └─ make talker a host copy of 8 MiB" in lines[register + 1]
    assert "     └─ host copy talker is made" in lines[register + 2]


def test_many_uses_in_a_row_are_one_line_unless_all_are_asked_for(swap_log: Path) -> None:
    folded = [line for line in _told(swap_log, "talker") if "uses without a copy" in line]
    assert len(folded) == 1
    assert "... 4 uses without a copy, from " in folded[0]
    everything = _told(swap_log, "talker", "--all")
    assert sum("hit talker" in line for line in everything) == 4


def test_an_unknown_name_says_so_with_the_near_ones(swap_log: Path) -> None:
    done = swapd("log", "talkr", "--file", swap_log, status=1)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "does not have 'talkr'; did you mean 'talker' or 'thinker'?" in line
    far = swapd("log", "zzz", "--file", swap_log, status=1).stderr
    assert "it has talker, thinker" in far


def test_an_unknown_name_lists_some_of_thousands(tmp_path: Path) -> None:
    asked = (SessionRequest(0.0, 1, Register(n, f"block/{n}", 1, "")) for n in range(1, 2001))
    lines = (render(Record(n, 0, 0.0, event=one)) for n, one in enumerate(asked, 1))
    log = file_with(tmp_path / "log", b"\n".join(lines).decode())
    said = swapd("log", "zzz", "--file", log, status=1).stderr
    assert "; it has block/1, block/10, " in said
    assert said.count("block/") == NAMES_SHOWN
    assert said.endswith(", ...\n")


def test_what_has_no_effect_on_it_is_refused() -> None:
    assert "goes with neither --follow" in swapd("log", "talker", "--blocks", status=2).stderr


def test_of_a_running_daemon(daemon: Running) -> None:
    daemon.client("worker", vae=2)
    assert "register vae 2 MiB, lru; by worker (session 1)" in (
        swapd("log", "vae", "-e", daemon.folder).stdout
    )
