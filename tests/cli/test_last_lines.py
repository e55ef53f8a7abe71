"""The last lines of a log are those that people read, as the file grows."""

from pathlib import Path

import pytest

from swapd.cli import last_lines
from swapd.cli.last_lines import LastLines
from swapd.core import Residency, Rules
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.log.records import Record, Start, render
from swapd.shared.protocol import SessionStatus
from tests.core.world import World


def logged(path: Path, chunks: int = 4) -> World:
    """A core whose records go to a file."""
    seq = 0

    def write(**what: object) -> None:
        nonlocal seq
        seq += 1
        with path.open("ab") as file:
            file.write(render(Record(seq, 0, **what)) + b"\n")  # type: ignore[arg-type]

    class Logged(Residency):
        def handle(self, event: AnyEvent) -> list[AnyAction]:
            done = super().handle(event)
            write(time=event.now, event=event)
            for action in done:
                write(time=event.now, action=action)
            return done

    write(time=0.0, start=Start("0", "host", chunks, 1, Rules()))
    return World(chunks, core=Logged)


def test_loads_and_evictions_are_among_them_and_hits_are_not(tmp_path: Path) -> None:
    w = logged(tmp_path / "log")
    lines = LastLines(tmp_path / "log", 100)
    s = w.open()
    w.register(s, "a", 3)
    w.register(s, "b", 3)
    for _ in range(300):
        w.touch(s, "a")
    lines.read()
    before = len(lines.lines)
    assert before < 10
    w.touch(s, "b")
    lines.read()
    fresh = [line.said for line in list(lines.lines)[before:]]
    assert any(said.verb == "evict" and "to make room for b" in said.detail for said in fresh)
    assert [line.seq for line in lines.lines] == sorted({line.seq for line in lines.lines})
    lines.close()


def test_the_labels_of_older_sessions_are_the_status_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_lines, "READ_BYTES", 8000)
    w = logged(tmp_path / "log")
    s = w.open()
    for name in ("a", *map(str, range(60))):
        w.register(s, name, 3)
    lines = LastLines(tmp_path / "log", 100)
    lines.read([SessionStatus(s, "painter", 0, 0)])
    w.touch(s, "a")
    w.register(s, "b", 3)
    w.touch(s, "b")
    lines.read()
    assert any("painter" in line.said.detail for line in lines.lines)
    lines.close()


def test_a_log_that_cannot_be_read_has_none(tmp_path: Path) -> None:
    lines = LastLines(tmp_path / "nowhere" / "log", 10)
    lines.read()
    assert not lines.lines
    lines.close()
