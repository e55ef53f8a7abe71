"""A reader of the swap log's file gets each record once, wherever the file was rotated."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from swapd.core import Rules, events
from swapd.log.history import LogLine
from swapd.log.records import OtherSchema, Record, Start, render
from swapd.log.tail import Tail


def ticks(*seqs: int) -> list[bytes]:
    return [render(Record(seq, 0, 1.0, event=events.Tick(1.0))) for seq in seqs]


def started() -> bytes:
    return render(Record(1, 0, 1.0, start=Start("9", "host", 1, 1, Rules())))


def append(path: Path, lines: Iterable[bytes]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))


def rotate(path: Path) -> None:
    os.replace(path, path.with_name(path.name + ".1"))


def numbers(lines: Iterable[LogLine]) -> list[int | str]:
    return [f"missed {r.dropped}" if r.dropped else r.seq for _, r in lines]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_it_has_the_past_of_both_files_and_each_new_record_once(path: Path) -> None:
    append(path, ticks(1, 2))
    rotate(path)
    append(path, ticks(3, 4))
    tail = Tail(path)
    assert numbers(tail.read()) == [1, 2, 3, 4]
    assert tail.read() == []
    append(path, ticks(5))
    assert numbers(tail.read()) == [5]
    tail.close()


def test_a_line_that_is_not_complete_is_read_when_it_is(path: Path) -> None:
    (line,) = ticks(1)
    path.write_bytes(line[:20])
    tail = Tail(path)
    assert tail.read() == []
    with path.open("ab") as file:
        file.write(line[20:] + b"\n")
    assert numbers(tail.read()) == [1]
    tail.close()


@pytest.mark.parametrize("rotations", [1, 2])
def test_a_rotation_between_two_reads_loses_nothing(path: Path, rotations: int) -> None:
    append(path, ticks(1))
    tail = Tail(path)
    assert numbers(tail.read()) == [1]
    append(path, ticks(2))
    for at in range(rotations):
        rotate(path)
        append(path, ticks(3 + at))
    assert numbers(tail.read()) == list(range(1, 3 + rotations))[1:]
    tail.close()


def test_records_that_no_file_has_are_counted(path: Path) -> None:
    append(path, ticks(1))
    tail = Tail(path)
    tail.read()
    for at in range(4):
        rotate(path)
        append(path, ticks(2 + at))
    assert numbers(tail.read()) == ["missed 2", 4, 5]
    append(path, [render(Record(9, 0, 1.0, dropped=3)), *ticks(9)])
    assert numbers(tail.read()) == ["missed 3", 9]
    append(path, [render(Record(15, 0, 1.0, dropped=3)), *ticks(15)])
    assert numbers(tail.read()) == ["missed 3", "missed 2", 15]
    tail.close()


def test_no_more_is_read_at_once_than_was_wanted(path: Path) -> None:
    append(path, ticks(*range(1, 100)))
    tail = Tail(path, most_bytes=len(b"".join(ticks(98, 99))) + 10)
    assert numbers(tail.read()) == [98, 99]
    append(path, ticks(100))
    assert numbers(tail.read()) == [100]
    append(path, ticks(*range(101, 201)))
    assert numbers(tail.read()) == [199, 200], "no more at a time"
    tail.close()


def test_a_log_that_begins_later_or_was_moved_or_emptied_goes_on(path: Path) -> None:
    tail = Tail(path)
    assert tail.read() == []
    append(path, [started(), *ticks(2)])
    assert numbers(tail.read()) == [1, 2]
    path.rename(path.with_name("elsewhere"))
    assert tail.read() == []
    append(path, ticks(3))
    assert numbers(tail.read()) == [3]
    os.truncate(path, 0)
    assert tail.read() == []
    append(path, [started()])
    assert numbers(tail.read()) == [1]
    tail.close()


def test_another_schema_is_told(path: Path) -> None:
    append(path, [started().replace(b'"schema":1', b'"schema":7'), *ticks(2)])
    tail = Tail(path)
    with pytest.raises(OtherSchema):
        tail.read()
    tail.close()
