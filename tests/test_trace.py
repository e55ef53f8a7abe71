"""A trace agrees with the swap log: every begin has an end, and exclusive spans do not overlap."""

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from swapd.core import actions, events
from swapd.log.reader import read
from swapd.log.records import Record
from swapd.log.trace import trace
from swapd.shared.protocol import Acquire, AcquireWorkspace, Register, Release
from tests.cli.conftest import serve, swapd
from tests.once import made_once

MIB = 1 << 20
Event = dict[str, Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a daemon on which two components took turns, as they do not fit together."""

    def make(folder: Path) -> None:
        folder.mkdir()
        run = folder / "run"
        run.mkdir(mode=0o700)
        daemon = serve(run)
        client = daemon.client("worker", thinker=12, talker=8)
        for name in ("thinker", "thinker", "talker", "thinker"):
            client.acquire(name).release()
        client.close()
        daemon.stop()
        swapd("trace", "-o", folder / "trace.json", "--file", daemon.swap_log)

    return made_once(tmp_path_factory, "trace", make) / "trace.json"


@pytest.fixture(scope="module")
def found(written: Path) -> list[Event]:
    loaded: list[Event] = json.loads(written.read_text())["traceEvents"]
    return loaded


def _track(found: list[Event], name: str) -> list[Event]:
    """The spans of a component, in order."""
    (head,) = [e for e in found if e["name"] == "thread_name" and e["args"]["name"] == name]
    ours = [e for e in found if e["ph"] == "X" and (e["pid"], e["tid"]) == (1, head["tid"])]
    return sorted(ours, key=lambda e: float(e["ts"]))


def test_a_component_comes_in_is_there_and_leaves_without_a_gap(found: list[Event]) -> None:
    talker = _track(found, "talker")
    assert [e["name"] for e in talker] == ["coming in", "on the device", "leaving"]
    assert talker[-1]["args"] == {"reason": "room", "for": "thinker"}
    for before, after in pairwise(talker):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=0.01)


def test_what_does_not_fit_together_is_never_there_together(found: list[Event]) -> None:
    there = [
        (e["ts"], e["ts"] + e["dur"])
        for name in ("thinker", "talker")
        for e in _track(found, name)
        if e["name"] == "on the device"
    ]
    assert len(there) == 3
    for (_, end), (start, _) in pairwise(sorted(there)):
        assert end <= start


def test_waits_leases_and_copies_begin_and_end(found: list[Event]) -> None:
    begun = {e["id"]: e for e in found if e["ph"] == "b"}
    ended = {e["id"]: e for e in found if e["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert all(begun[key]["ts"] <= ended[key]["ts"] for key in begun)
    names = [e["name"] for e in begun.values()]
    assert names.count("lease: thinker") == 3
    assert names.count("lease: talker") == 1
    copied = [e["args"]["bytes"] for e in begun.values() if e["cat"] == "copy"]
    assert sorted(copied) == [8 * MIB, 12 * MIB, 12 * MIB]


def test_every_track_has_a_name(found: list[Event]) -> None:
    named = {e["pid"] for e in found if e["name"] == "process_name"}
    assert {e["pid"] for e in found} == named
    labels = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert "worker (session 1)" in labels


def test_perfetto_reads_it(written: Path) -> None:
    processor = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
    if processor is None:
        pytest.skip("no trace_processor_shell is installed: Perfetto's package downloads it")
    query = "select name, count(*) as n from slice group by name"
    done = subprocess.run(
        [processor, "-Q", query, str(written)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "on the device" in done.stdout


def _records(*said: events.AnyEvent | actions.AnyAction) -> list[Record]:
    return [
        Record(i, 0, 100.0 + i, event=item)
        if isinstance(item, events.Event)
        else Record(i, 0, 100.0 + i, action=item)
        for i, item in enumerate(said, 1)
    ]


def test_what_goes_on_at_the_end_of_the_log_ends_there() -> None:
    records = _records(
        events.SessionOpened(0.0, 1, "worker"),
        events.SessionRequest(0.0, 1, Register(1, "a", MIB)),
        events.SessionRequest(0.0, 1, Acquire(2, ("a",))),
        actions.Waiting(1, 2, ("a",), "needs room"),
        actions.CopyIn(1, "a", 1, MIB, ((0, 1),)),
        events.SessionRequest(0.0, 1, AcquireWorkspace(3, MIB)),
        actions.Lend(1, "workspace 1.3", 2, ((1, 1),)),
        events.Lent(0.0, 2),
        actions.Grant(1, 3, (), 0.0, False),
    )
    ends = [e for e in trace(records) if e["ph"] in "eX"]
    assert {e["name"] for e in ends} == {
        "coming in",
        "being lent",
        "lent",
        "a",
        "wait: a",
        "lease: workspace 1.3",
    }
    assert max(e["ts"] + e.get("dur", 0.0) for e in ends) == 8e6


def test_a_session_that_goes_ends_what_it_had() -> None:
    records = _records(
        events.SessionOpened(0.0, 1, "worker"),
        events.SessionRequest(0.0, 1, Acquire(2, ("a",))),
        actions.Grant(1, 2, (), 0.5, True),
        events.SessionRequest(0.0, 1, Acquire(3, ("b",))),
        actions.Waiting(1, 3, ("b",), "needs room"),
        events.SessionGone(0.0, 1),
        events.Tick(9.0),
    )
    ends = [(e["name"], e["ts"]) for e in trace(records) if e["ph"] == "e"]
    assert ends == [("wait: a", 2e6), ("wait: b", 5e6), ("lease: a", 5e6)]


def test_a_component_leaves_with_its_session_or_its_last_host_copy() -> None:
    records = _records(
        events.SessionRequest(0.0, 1, Register(1, "a", MIB)),
        actions.MakeHostCopy(1, 1, "a", MIB, False, (), 1),
        actions.CopyIn(1, "a", 1, MIB, ((0, 1),)),
        events.CopiedIn(0.0, 1),
        actions.MakeHostCopy(1, 2, "a", MIB, False, (), 2),
        actions.DropHostCopy(1, "a"),
        events.SessionGone(0.0, 1),
        actions.DropHostCopy(2, "a"),
        events.Tick(9.0),
    )
    made = list(trace(records))
    (there,) = [e for e in made if e["name"] == "on the device" and e["ph"] == "X"]
    assert (there["ts"], there["dur"]) == (3e6, 4e6)
    assert [e["args"]["bytes"] for e in made if e["ph"] == "C"] == [MIB, 0]


def test_a_log_that_lost_its_beginning_is_traced_all_the_same() -> None:
    records = _records(
        events.CopiedIn(0.0, 7),
        actions.Grant(4, 9, (), 0.25, True),
        events.SessionRequest(0.0, 4, Release(10, 9)),
        actions.Evicted("b", 3, MIB, 0),
        actions.Refuse(4, 11, "timeout", "held"),
    )
    assert [e["name"] for e in trace(records) if e["ph"] in "bi"] == [
        "wait: request 9",
        "lease: request 9",
        "refused, timeout: held",
    ]


def test_a_load_that_was_stopped_ends_in_the_trace_too() -> None:
    records = _records(
        actions.CopyIn(1, "a", 1, MIB, ((0, 1),)),
        actions.Evict("a", 1, "room"),
        actions.StopCopy("a", 1),
        events.CopyStopped(0.0, 1),
        actions.Evicted("a", 1, MIB, 0),
        events.Tick(9.0),
    )
    made = list(trace(records))
    spans = {e["name"]: (e["ts"], e["dur"]) for e in made if e["ph"] == "X"}
    assert spans["coming in"] == (0, 1e6)
    assert spans["leaving"] == (1e6, 3e6)
    (copied,) = [e["ts"] for e in made if e["ph"] == "e" and e["cat"] == "copy"]
    assert copied == 3e6


def test_after_a_copy_that_failed_it_is_where_it_was_before() -> None:
    records = _records(
        actions.CopyIn(1, "a", 1, MIB, ((0, 1),)),
        events.CopyFailed(0.0, 1, "injected"),
        actions.Lend(1, "workspace 1.2", 2, ((0, 1),)),
        events.CopyFailed(0.0, 2, "injected"),
        actions.Evict("b", 3, "room"),
        actions.CopyOut(2, "b", 3, MIB, ((1, 1),)),
        events.CopyFailed(0.0, 3, "injected"),
        events.Tick(9.0),
    )
    spans = [(e["name"], e["ts"], e["dur"]) for e in trace(records) if e["ph"] == "X"]
    assert spans == [
        ("coming in", 0, 1e6),
        ("being lent", 2e6, 1e6),
        ("leaving", 4e6, 2e6),
        ("on the device", 6e6, 1e6),
    ]


def test_components_on_the_same_chunks_count_once() -> None:
    runs = ((0, 1),)
    records = _records(
        events.SessionRequest(0.0, 1, Register(1, "a", MIB)),
        events.SessionRequest(0.0, 2, Register(1, "b", MIB)),
        actions.CopyIn(1, "a", 1, MIB, runs),
        events.CopiedIn(0.0, 1),
        actions.CopyIn(2, "b", 2, MIB, runs, joins="a"),
        actions.Evict("a", 1, "joined"),
        actions.Evicted("a", 1, MIB, 0),
        events.CopiedIn(0.0, 2),
        actions.Evicted("b", 2, MIB, 0),
    )
    counted = [e["args"]["bytes"] for e in trace(records) if e["ph"] == "C"]
    assert counted == [MIB, MIB, MIB, 0]


def test_only_what_was_not_over_by_then() -> None:
    records = _records(
        actions.CopyIn(1, "a", 1, MIB, ((0, 1),)),
        events.CopiedIn(0.0, 1),
        actions.Evict("a", 2, "room"),
        actions.Evicted("a", 2, MIB, 0),
    )
    names = [e["name"] for e in trace(records, since=102.5) if e["ph"] == "X"]
    assert names == ["on the device", "leaving"]


def test_names_are_harmless() -> None:
    evil = "a\x1b[2J\u202e"
    for event in trace(_records(actions.CopyIn(1, evil, 1, MIB, ((0, 1),)))):
        said = json.dumps(event, ensure_ascii=False)
        assert "\x1b" not in said
        assert "\u202e" not in said


def test_every_record_of_a_real_log_is_read(written: Path) -> None:
    log = read(written.parent / "run" / "swap-log.jsonl")
    assert len(list(trace(line.record for line in log))) > 20
