"""A reader of the swap log's file gets each record once, wherever the file was rotated."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from swapd.core import Rules, events
from swapd.log.reader import LogLine, Reader, Tail, last_run, read, runs_since
from swapd.log.records import Record, SchemaMismatch, Start, render


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


def test_lines_of_both_files_are_kept_as_they_were_written(path: Path) -> None:
    assert last_run([]) == []
    append(path, [started(), *ticks(2)])
    rotate(path)
    append(path, ticks(3, 4))
    assert [line.raw for line in read(path)] == [started(), *ticks(2, 3, 4)]
    rotate(path)
    with pytest.raises(FileNotFoundError):
        read(path)


def test_what_does_not_parse_or_is_still_being_written_is_left_out(path: Path) -> None:
    later = b'{"seq":2,"t":1.0,"type":"event","cause":0,"kind":"teleported","now":1.0}'
    append(path, [started(), b'{"seq":2,"cau', later, *ticks(3)])
    with path.open("ab") as file:
        file.write(ticks(4)[0][:-1])
    assert numbers(read(path)) == [1, 3]


def test_the_last_run_begins_with_the_last_start_or_a_lower_number() -> None:
    note = render(Record(5, 0, 1.0, dropped=3))  # shares a number with the next
    for lines, first in (
        ([started(), *ticks(2), started(), *ticks(2, 3)], 2),
        ([started(), *ticks(2, 9, 4, 5)], 3),
        ([started(), note, *ticks(5, 6)], 0),
    ):
        found = list(Reader().read(lines))
        assert last_run(found) == found[first:]


@pytest.mark.parametrize(("since", "first"), [(100.0, 2), (150.0, 2), (200.0, 4), (900.0, 4)])
def test_the_runs_since_a_time_are_of_this_boot_whatever_the_wall_clock_says(
    since: float, first: int
) -> None:
    lines = []
    for began, epoch in (
        (500.0, 1e9),  # of an earlier boot
        (100.0, 2e9),
        (200.0, 1e9),  # the wall clock was set back meanwhile
    ):
        ended = events.Tick(began + 10.0)
        start = Record(1, 0, epoch + began, start=Start("9", "host", 1, 1, Rules()))
        lines += [render(start), render(Record(2, 0, epoch + ended.now, event=ended))]
    found = list(Reader().read(lines))
    assert runs_since(found, since) == found[first:]


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


def test_a_log_that_is_moved_elsewhere_after_a_rotation_is_not_read_again(path: Path) -> None:
    append(path, ticks(1))
    rotate(path)
    append(path, ticks(2))
    os.utime(path.with_name("log.1"), (1.0, 1.0))  # hours ago
    tail = Tail(path)
    assert numbers(tail.read()) == [1, 2]
    path.rename(path.with_name("elsewhere"))
    append(path, ticks(3))
    assert numbers(tail.read()) == [3]
    tail.close()


def test_another_schema_is_told(path: Path) -> None:
    append(path, [started().replace(b'"schema":1', b'"schema":7'), *ticks(2)])
    tail = Tail(path)
    with pytest.raises(SchemaMismatch):
        tail.read()
    tail.close()
