"""The summary of the swap log, for each device and each stage."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from swapd.core import Rules, actions, events
from swapd.log.records import Record, Start
from swapd.run.commands import command_of
from swapd.run.file import StageSpec
from swapd.run.outcome import of_device, of_stages, stage_of
from swapd.run.stages import StageState
from swapd.shared.text import TEXT_MAX_CHARS
from swapd_client import InvalidArgument
from swapd_client.session.endpoint import label_of

MIB = 1 << 20
#: Wall time at time 0 of the core's clock.
UNIX = 1e9


def records(*said: Any, begin: float) -> list[Record]:
    """Records of these events and actions, a second apart."""
    return [record(item, begin + i) for i, item in enumerate(said)]


def record(item: Any, now: float) -> Record:
    if not isinstance(item, events.Event):
        return Record(1, 0, UNIX + now, action=item)
    event: Any = structs.replace(item, now=now)
    return Record(1, 0, UNIX + now, event=event)


def test_copies_are_of_the_stage_that_has_the_component_and_waits_of_the_one_that_asks() -> None:
    before = records(
        events.SessionOpened(0.0, 1, "a/worker"),
        events.SessionOpened(0.0, 2, "b/worker"),
        events.SessionOpened(0.0, 3, "worker"),
        actions.MakeHostCopy(1, 1, "x", 8 * MIB, False),
        actions.MakeHostCopy(3, 2, "y", 8 * MIB, False),
        actions.CopyIn(1, "x", 1, 8 * MIB, ((0, 4),)),
        events.CopiedIn(0.0, 1),
        begin=0.0,
    )
    since = records(
        actions.CopyOut(1, "x", 2, 8 * MIB, ((0, 4),)),
        events.CopiedOut(0.0, 2),
        actions.CopyIn(1, "x", 3, 8 * MIB, ((0, 4),)),
        events.CopiedIn(0.0, 3),
        actions.CopyIn(2, "y", 4, 8 * MIB, ((0, 4),)),
        events.CopiedIn(0.0, 4),
        actions.Grant(2, 1, (), 0.5, True),
        actions.Grant(2, 2, (), 0.0, True),
        actions.Grant(3, 1, (), 0.5, True),
        actions.Refuse(1, 3, "timeout", "held"),
        actions.Refuse(1, 4, "timeout", "held", tried=True),
        begin=100.0,
    )
    ended = {"a": (2, 0), "b": (1, 7), "c": (0, None)}
    states = {name: StageState(StageSpec(name, command_of(["x"]), {}, Path())) for name in ended}
    for name, (starts, status) in ended.items():
        states[name].starts, states[name].status = starts, status
    a, b, c = of_stages(states, [before + since, before], 100.0)
    assert str(a) == (
        "a: 1 swap, 8 MiB in and 8 MiB out; no request waited, 1 refused; status 0, 2 starts"
    )
    assert str(b) == "b: 0 swaps, 0 B in and 0 B out; 1 request waited 500 ms; status 7"
    assert str(c) == "c: 0 swaps, 0 B in and 0 B out; no request waited; was not started"


def test_sessions_of_a_stage_are_known_by_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert label_of("worker") == "worker"
    monkeypatch.setenv("SWAPD_STAGE", "a")
    assert label_of("worker") == "a/worker"
    assert stage_of(label_of(None), ["a", "b"]) == "a"
    assert label_of("swapd status") == "swapd status"  # an observer
    assert len(label_of("x" * TEXT_MAX_CHARS)) == TEXT_MAX_CHARS
    with pytest.raises(InvalidArgument, match="has 300 characters"):  # as without a stage
        label_of("x" * 300)
    assert [stage_of(label, ["a"]) for label in ("a", "b/x", "/x", "a/")] == [None, None, None, "a"]


def test_what_was_before_the_command_is_not_counted_but_its_memory_is() -> None:
    said: list[Any] = [
        actions.CopyIn(1, "a", 1, 8 * MIB, ((0, 4),), in_use=4),
        events.CopiedIn(0.0, 1),
        actions.Grant(1, 1, (), 0.5, True),
        actions.CopyIn(2, "b", 2, 4 * MIB, ((4, 2),), in_use=6),
        events.CopiedIn(0.0, 2),
        actions.Grant(1, 2, (), 0.25, True),
        actions.Refuse(1, 3, "timeout", "held", tried=True),
        actions.Refuse(1, 4, "timeout", "held"),
        actions.Evict("a", 3, "room"),
        actions.Evicted("a", 3, 8 * MIB, 0),
    ]
    start = Record(1, 0, UNIX, start=Start("", "host", 8, 2 * MIB, Rules()))
    found = of_device([start, *records(*said, begin=100.0)], since=103.0)
    assert (found.swaps, found.bytes_in, found.waits, found.waited_s) == (1, 4 * MIB, 1, 0.25)
    assert (found.refusals, found.peak_bytes) == (1, 12 * MIB)
    assert str(found) == (
        "host: 1 swap, 4 MiB in and 0 B out; 1 request waited 250 ms, 1 refused; at most 12 MiB "
        "of 16 MiB used"
    )


def test_a_daemon_in_the_place_of_another_is_counted_too() -> None:
    start = Record(1, 0, UNIX, start=Start("", "host", 8, 2 * MIB, Rules()))
    before, after = (
        records(
            events.SessionOpened(0.0, 1, label),
            actions.MakeHostCopy(1, 1, "x", 8 * MIB, False),
            actions.CopyIn(1, "x", 1, 8 * MIB, ((0, 4),), in_use=used),
            events.CopiedIn(0.0, 1),
            begin=begin,
        )
        for label, used, begin in (("a/worker", 6, 100.0), ("b/worker", 4, 200.0))
    )
    both = [start, *before, start, *after]
    states = {name: StageState(StageSpec(name, command_of(["x"]), {}, Path())) for name in "ab"}
    found = of_device(both, since=100.0)
    assert (found.swaps, found.peak_bytes) == (2, 12 * MIB)
    assert [one.swaps for one in of_stages(states, [both], since=100.0)] == [1, 1]
