"""Text of other processes and of files reaches a terminal as text, and as nothing else."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from swapd.cli import serve as serving
from swapd.cli.common import console, facts, say_error
from swapd.core import actions, events
from swapd.core.records import Rules
from swapd.log.records import Record, Start, render
from swapd.shared.protocol import Register

from .conftest import Running, on_terminal, swapd

EVIL = "x\x1b]0;owned\a\x9b2J\u202e\nforged: all is well"


def assert_harmless(shown: str) -> None:
    for line in shown.split("\n"):
        assert line.isprintable(), repr(line)
        assert not line.startswith("forged"), shown


@pytest.fixture
def swap_log(tmp_path: Path) -> Path:
    """The log of a daemon that believed all its workers said."""
    asked = Register(1, EVIL, 1, EVIL, group=EVIL, part_of=EVIL, content=EVIL)
    said: list[dict[str, Any]] = [
        {"start": Start("0", EVIL, 8, 1 << 20, Rules())},
        {"event": events.SessionOpened(0.0, 1, EVIL)},
        {"event": events.SessionRequest(0.0, 1, asked)},
        {"action": actions.Refuse(1, 1, "conflict", EVIL)},
        {"action": actions.Fence(1, EVIL)},
        {"action": actions.Lost(EVIL, 1, EVIL)},
    ]
    records = [Record(seq, 0, 0.0, **one) for seq, one in enumerate(said, 1)]
    path = tmp_path / "log"
    path.write_bytes(b"\n".join(map(render, records)) + b"\n")
    return path


def test_square_brackets_and_colons_are_text() -> None:
    said = "stopped: /run/[red]cuda0 of :smile:"
    with console.capture() as shown:
        console.print(said)
        console.print(facts([("starting", said)]))
    assert shown.get().count(said) == 2


def test_the_log_for_people(swap_log: Path) -> None:
    assert_harmless(swapd("log", "--all", "--file", swap_log).stdout)
    assert_harmless(on_terminal("log", "--all", "--file", swap_log))


def test_the_log_as_json_means_the_same(swap_log: Path) -> None:
    shown = swapd("log", "--json", "--file", swap_log).stdout
    assert_harmless(shown)
    written = swap_log.read_text().splitlines()
    assert [json.loads(line) for line in shown.splitlines()] == [
        json.loads(line) for line in written
    ]


def test_the_log_of_a_component_and_of_what_is_none(swap_log: Path) -> None:
    assert_harmless(swapd("log", EVIL, "--file", swap_log).stdout)
    told = swapd("log", EVIL, "--json", "--file", swap_log).stdout
    assert_harmless(told)
    assert json.loads(told.splitlines()[0])["depth"] == 0
    for name in ("y", EVIL[:-1]):
        assert_harmless(swapd("log", name, "--file", swap_log, status=1).stderr)


def test_an_error_is_one_line_whatever_it_quotes(folder: Path) -> None:
    for words in (
        ["plan", EVIL],
        ["plan", f"{EVIL}=1GiB", "--device-memory", "1GiB", "--bandwidth", "1GB/s"],
        ["status", "-e", folder / EVIL.replace("/", "")],
        ["serve", "--config", folder / EVIL],
        ["serve", "--device", EVIL],
        ["serve", "--runtime-dir", folder / EVIL],
        ["serve", "--swap-log", folder / EVIL],
    ):
        said = swapd(*words, status=1).stderr
        assert_harmless(said)
        assert len(said.splitlines()) == 1, said


def test_a_path_that_is_no_text_is_shown_all_the_same(folder: Path) -> None:
    where = folder / "\udcff\x1b"
    shown = swapd("doctor", "-e", where).stdout
    assert_harmless(shown)
    assert r"\udcff\x1b, still to be made" in shown
    rows = json.loads(swapd("doctor", "--json", "-e", where).stdout)
    assert any(r"\udcff" in row["found"] for row in rows)
    assert_harmless(swapd("status", "-e", where, status=1).stderr)


def test_a_daemon_of_what_is_fit_to_print_goes_on(daemon: Running) -> None:
    daemon.client("worker", größe=1)
    assert "größe" in swapd("status", "-e", daemon.folder).stdout
    assert "größe" in swapd("log", "--json", "-e", daemon.folder).stdout


def test_what_is_printed_for_people_is_harmless_also_where_nobody_thought_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console.print(f"[bold]{EVIL}[/]".replace("\n", ""))
    assert_harmless(capsys.readouterr().out)
    say_error(EVIL)
    assert_harmless(capsys.readouterr().err)


def test_the_daemon_s_own_log_is_a_line_for_each_record(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(serving.LogFormatter("%(name)s: %(message)s"))
    log = logging.Logger("swapd")
    log.addHandler(handler)
    log.warning("%s", EVIL)
    said = capsys.readouterr().err
    assert_harmless(said)
    assert len(said.splitlines()) == 1
    try:
        raise ValueError(EVIL.replace("\n", ""))
    except ValueError:
        log.exception("it failed")
    said = capsys.readouterr().err
    assert_harmless(said)
    assert len(said.splitlines()) > 3
