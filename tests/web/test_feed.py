"""A feed gives each record once, reads missed ones from the log, and counts lost ones."""

import asyncio
from pathlib import Path

import pytest

from swapd.core import events
from swapd.core.policy import Rules
from swapd.log.records import Record, Start, render
from swapd.web import feed


def opened(seq: int) -> Record:
    return Record(seq, 0, 1.0, event=events.SessionOpened(1.0, seq, 'says "type":"start"'))


def start() -> Record:
    return Record(1, 0, 1.0, start=Start("9.9", "host", 8, 2 << 20, Rules()))


def write(path: Path, *records: Record) -> None:
    path.write_bytes(b"".join(render(record) + b"\n" for record in records))


def feed_of(path: Path, *seqs: int) -> tuple[list[int], list[int]]:
    """The numbers of the records taken, and the gaps, for a stream of these records."""
    taken: list[int] = []
    gaps: list[int] = []

    async def run() -> None:
        whole = feed.Whole(path, lambda record: taken.append(record.seq), gaps.append)
        for seq in seqs:
            await whole.received(render(opened(seq)))

    asyncio.run(run())
    return taken, gaps


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(feed, "LAG_S", 0.0)
    return tmp_path / "swap-log.jsonl"


def test_what_was_before_is_taken_from_the_file(path: Path) -> None:
    write(path, start(), *map(opened, range(2, 6)))
    assert feed_of(path, 4, 5, 6) == ([1, 2, 3, 4, 5, 6], [])


def test_what_the_stream_left_out_is_taken_from_the_file(path: Path) -> None:
    write(path, start(), *map(opened, range(2, 9)))
    assert feed_of(path, 2, 3, 7, 8) == ([1, 2, 3, 4, 5, 6, 7, 8], [])


def test_what_is_in_neither_is_counted_where_it_is_missing(path: Path) -> None:
    write(path, start(), opened(2), opened(5))
    assert feed_of(path, 2, 9) == ([1, 2, 5, 9], [2, 3])


def test_nothing_is_taken_from_a_run_before(path: Path) -> None:
    write(path, start(), *map(opened, range(2, 20)), start(), *map(opened, range(2, 4)))
    assert feed_of(path, 3, 6) == ([1, 2, 3, 6], [2])


def test_a_file_that_was_rotated_or_cut_off_is_read_as_far_as_it_goes(path: Path) -> None:
    write(path.with_name(path.name + ".1"), start(), opened(2))
    write(path, opened(3), opened(4))
    with path.open("ab") as file:
        file.write(render(opened(5))[:-3])
    assert feed_of(path, 6) == ([1, 2, 3, 4, 6], [1])


def test_without_a_file_all_that_comes_is_taken(path: Path) -> None:
    assert feed_of(path, 3, 4, 4, 2, 5) == ([3, 4, 5], [2])


def test_garbage_is_passed_over(path: Path) -> None:
    taken: list[int] = []

    async def run() -> None:
        whole = feed.Whole(path, lambda record: taken.append(record.seq), lambda count: None)
        for line in (b"", b"{", b"\xff", b"[" * 10_000, b'{"seq":1,"t":0,"type":"new"}'):
            await whole.received(line)
        await whole.received(render(start()))

    asyncio.run(run())
    assert taken == [1]
