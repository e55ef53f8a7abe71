"""The schema of the swap log: flat, as on its page; other schemas are refused with a message."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import swapd.log
from swapd.core import Rules, actions, events
from swapd.core.actions import AnyAction
from swapd.core.events import AnyEvent
from swapd.log.reader import last_run, read, read_runs
from swapd.log.records import SCHEMA, Record, SchemaMismatch, Start, parse, render
from swapd.log.replay import ReplayError, replay
from swapd.shared.protocol import AnyOrder, Ranges, Register, Release, UsedRanges
from tests.samples import sample

PAGE = (Path(swapd.log.__file__).parent / "README.md").read_text()
EXAMPLES = [line for line in PAGE.splitlines() if line.startswith('{"seq"')]
REQUESTS = get_args(AnyOrder)
EVENTS = [kind for kind in get_args(AnyEvent) if kind is not events.SessionRequest]
ACTIONS = get_args(AnyAction)
START = Record(1, 0, 1.0, start=Start("9.9", "host", 8, 2 << 20, Rules()))
TICK = Record(2, 0, 2.0, event=events.Tick(2.0))
NEXT = START, TICK

#: The fields of every record, or every event, besides its own.
OURS = {"seq", "t", "type", "kind", "cause", "now", "session", "schema", "count"}

UNNUMBERED = (
    b'{"seq":1,"t":1.5,"type":"start","version":"0","device":"host","chunks":8,"chunk_bytes":2}',
    b'{"seq":2,"t":1.5,"type":"event","cause":0,"kind":"tick","now":1.0}',
)
LATER = (
    b'{"seq":1,"t":1.5,"type":"start","schema":2,"version":"9","model":"x"}',
    b'{"seq":2,"t":1.5,"type":"event","cause":0,"kind":"tick","now":1.0}',
)


def record_of(kind: Any) -> Record:
    if kind in REQUESTS:
        return Record(7, 3, 1.25, event=events.SessionRequest(1.5, 4, sample(kind)))
    if kind in ACTIONS:
        return Record(7, 3, 1.25, action=sample(kind))
    return Record(7, 3, 1.25, event=sample(kind))


def write(path: Path, *lines: bytes | Record) -> Path:
    whole = [render(line) if isinstance(line, Record) else line for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in whole))
    return path


@pytest.mark.parametrize("line", EXAMPLES)
def test_the_examples_of_the_page_are_lines_of_the_log(line: str) -> None:
    assert render(parse(line)).decode() == line


def test_the_page_has_one_of_each_type() -> None:
    assert {json.loads(line)["type"] for line in EXAMPLES} == {
        "start",
        "event",
        "action",
        "dropped",
    }
    assert f"schema {SCHEMA}" in PAGE
    assert json.loads(EXAMPLES[0])["schema"] == SCHEMA


@pytest.mark.parametrize("kind", [*REQUESTS, *EVENTS, *ACTIONS])
def test_a_record_is_flat_and_says_what_it_is_and_reads_back(kind: Any) -> None:
    record = record_of(kind)
    assert parse(render(record)) == record
    line = json.loads(render(record))
    assert (line["seq"], line["t"], line["cause"]) == (7, 1.25, 3)
    assert line["type"] == ("action" if kind in ACTIONS else "event")
    assert line["kind"] == kind.__struct_config__.tag
    assert not any(isinstance(value, dict) for value in line.values())
    fields = {field.name for field in msgspec.structs.fields(kind)}
    assert line.keys() - OURS == fields - OURS, "all its fields are at the top"


@pytest.mark.parametrize("kind", [*REQUESTS, *EVENTS, *ACTIONS, Start])
def test_no_field_has_the_name_of_one_that_all_records_have(kind: Any) -> None:
    fields = {field.name for field in msgspec.structs.fields(kind)}
    allowed = {"now", "session"} if kind in EVENTS else {"session"} if kind in ACTIONS else set()
    allowed |= {"count"} if kind is events.Unread else set()  # no `dropped` has a kind
    assert fields.isdisjoint(OURS - allowed)


def test_every_kind_is_one_thing() -> None:
    tags = [kind.__struct_config__.tag for kind in (*REQUESTS, *EVENTS, *ACTIONS)]
    assert len(set(tags)) == len(tags)


def test_what_has_its_default_is_left_out() -> None:
    line = json.loads(render(Record(2, 0, 1.0, event=events.SessionGone(1.0, 3))))
    assert line.keys() == {"seq", "t", "type", "cause", "kind", "now", "session"}


@pytest.mark.parametrize("kind", [actions.CopyIn, actions.CopyOut])
@pytest.mark.parametrize("only", [None, (), ((0, 1), (3, 2))], ids=["all", "none", "part"])
def test_a_copy_says_which_ranges_unless_it_is_of_all(
    kind: type[actions.CopyIn | actions.CopyOut], only: Ranges | None
) -> None:
    copy = Record(3, 2, 1.0, action=kind(1, "kv", 4, 8, ((0, 4),), only=only))
    line = json.loads(render(copy))
    assert ("only" in line) == (only is not None)
    assert parse(render(copy)) == copy


@pytest.mark.parametrize("ranges", [(), ((0, 1), (3, 2))], ids=["none", "part"])
def test_what_is_used_of_scratch_reads_back_as_it_was_said(ranges: Ranges) -> None:
    said = Release(21, 20, used=(UsedRanges("kv", 2, ranges), UsedRanges("other", 1, ())))
    record = Record(3, 0, 1.0, event=events.SessionRequest(1.5, 4, said))
    assert json.loads(render(record))["used"][0] == {
        "name": "kv",
        "number": 2,
        "ranges": [list(r) for r in ranges],
    }
    assert parse(render(record)) == record


def test_records_of_what_is_no_scratch_say_nothing_of_it() -> None:
    for record in (
        Record(3, 0, 1.0, event=events.SessionRequest(1.5, 4, Register(1, "a", 8))),
        Record(3, 0, 1.0, event=events.SessionRequest(1.5, 4, Release(21, 20))),
        Record(3, 2, 1.0, action=actions.MakeHostCopy(4, 1, "a", 8, False)),
    ):
        assert json.loads(render(record)).keys().isdisjoint({"scratch", "used", "empty"})


@pytest.mark.parametrize("field", ["scratch", "empty", "only", "used", "contents"])
def test_the_page_says_what_each_field_of_scratch_means(field: str) -> None:
    assert f"| `{field}` |" in PAGE


@pytest.mark.parametrize("other", [UNNUMBERED, LATER], ids=["unnumbered", "later"])
def test_a_log_in_another_schema_is_refused_in_words(
    tmp_path: Path, other: tuple[bytes, ...]
) -> None:
    log = write(tmp_path / "log", *NEXT, *other)
    with pytest.raises(SchemaMismatch, match=f"schema {SCHEMA}"):
        read(log)
    with pytest.raises(ReplayError, match=f"schema {SCHEMA}"):
        list(replay(other))


@pytest.mark.parametrize("other", [UNNUMBERED, LATER], ids=["unnumbered", "later"])
def test_earlier_runs_in_another_schema_are_left_out_and_counted(
    tmp_path: Path, other: tuple[bytes, ...]
) -> None:
    log = write(tmp_path / "log", *other, *NEXT)
    assert [line.record for line in read(log)] == [*NEXT]
    assert last_run(read(log)) == read(log)
    lines, reader = read_runs(log)
    assert (lines, reader.left_out) == (read(log), 2)


def test_a_kind_that_is_not_known_yet_costs_its_line_only(tmp_path: Path) -> None:
    later = b'{"seq":2,"t":1.0,"type":"action","cause":0,"kind":"teleported","to":"x"}'
    more = render(TICK)[:-1] + b',"more":[1]}'
    assert [line.record for line in read(write(tmp_path / "log", START, later, more))] == [*NEXT]
    assert parse(more) == TICK
    with pytest.raises(msgspec.ValidationError):
        parse(later)


def test_a_name_that_looks_like_the_end_of_a_line_is_a_name() -> None:
    odd = Record(3, 2, 1.0, action=actions.SealHostCopy(1, 'a}\n{"op":'))
    assert parse(render(odd)) == odd
