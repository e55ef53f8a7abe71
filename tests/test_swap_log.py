"""The swap log: numbered, with causes, in whole lines; a full disk costs lines of the file only."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from swapd.core import actions, events
from swapd.core.actions import DropHostCopy
from swapd.core.events import Tick
from swapd.core.records import Rules
from swapd.log import reader
from swapd.log import swap_log as swap_log_module
from swapd.log.records import Record, Start, parse, render
from swapd.log.swap_log import SwapLog, SwapLogFile
from tests.processes import output_of

START = Start("1.2.3", "host", 8, 2 << 20, Rules())
#: Seconds: longer than any test.
AGE = 1e12


def line(seq: int, width: int = 0) -> bytes:
    return render(Record(seq, 0, 1.5, action=DropHostCopy(seq, "x" * width)))


def seqs(path: Path) -> list[int]:
    """The numbers in a file, which must consist of whole lines."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return [parse(text).seq for text in data.splitlines()]


class Subscriber:
    """The published records, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[list[Record]] = []
        self.came = asyncio.Event()

    def __call__(self, lines: Sequence[bytes]) -> None:
        self.batches.append([parse(text) for text in lines])
        self.came.set()

    @property
    def records(self) -> list[Record]:
        return [record for batch in self.batches for record in batch]


@pytest.fixture
def subscriber() -> Subscriber:
    return Subscriber()


@pytest.fixture
async def swap_log(tmp_path: Path, subscriber: Subscriber) -> AsyncIterator[SwapLog]:
    loop = asyncio.get_running_loop()
    swap_log = SwapLog(SwapLogFile(tmp_path / "swap-log.jsonl", 1 << 20, AGE), subscriber, loop)
    yield swap_log
    swap_log.close()


# --- records -----------------------------------------------------------------------------


def test_the_first_record_and_what_was_dropped_read_back_too() -> None:
    for record in (Record(1, 0, 0.5, start=START), Record(9, 0, 0.5, dropped=3)):
        assert parse(render(record)) == record


def test_names_with_newlines_and_quotes_stay_on_their_line() -> None:
    record = Record(1, 0, 0.0, action=DropHostCopy(1, 'a\n"b"\u2028\\'))
    assert parse(render(record)) == record
    assert len(render(record).splitlines()) == 1


async def test_records_count_up_by_one_and_carry_their_cause(
    swap_log: SwapLog, subscriber: Subscriber
) -> None:
    swap_log.start(START)
    asked = swap_log.event(Tick(1.0), 0)
    ordered = swap_log.action(actions.SealHostCopy(5, "a"), asked, 1.0)
    answered = swap_log.event(events.HostCopySealed(2.0, 5), ordered)
    done = swap_log.action(actions.Accept(1, 2), answered, 2.0)
    swap_log.flush()
    assert (asked, ordered, answered, done) == (2, 3, 4, 5)
    found = subscriber.records
    assert [record.seq for record in found] == [1, 2, 3, 4, 5]
    assert [record.cause for record in found] == [0, 0, 2, 3, 4]
    assert found[0].start == START
    assert found[3].event == events.HostCopySealed(2.0, 5)
    assert found[4].action == actions.Accept(1, 2)


async def test_times_are_those_of_the_events_on_the_wall_clock(
    swap_log: SwapLog, subscriber: Subscriber
) -> None:
    now = time.monotonic()
    swap_log.event(Tick(now), 0)
    swap_log.event(Tick(now + 10.0), 0)
    swap_log.flush()
    first, second = subscriber.records
    assert second.time - first.time == pytest.approx(10.0)
    assert first.time == pytest.approx(time.time(), abs=60)  # noqa: TID251


# --- batches -----------------------------------------------------------------------------


async def test_records_are_handed_over_together_soon_after_the_first(
    swap_log: SwapLog, subscriber: Subscriber
) -> None:
    for i in range(100):
        swap_log.event(Tick(float(i)), 0)
    assert not subscriber.batches, "nothing is rendered while the core works"
    await subscriber.came.wait()
    assert [len(batch) for batch in subscriber.batches] == [100]
    subscriber.came.clear()
    swap_log.event(Tick(101.0), 0)
    await subscriber.came.wait()
    assert [len(batch) for batch in subscriber.batches] == [100, 1]


async def test_close_waits_until_the_file_has_it_all(
    tmp_path: Path, subscriber: Subscriber
) -> None:
    path = tmp_path / "swap-log.jsonl"
    swap_log = SwapLog(SwapLogFile(path, 1 << 20, AGE), subscriber, asyncio.get_running_loop())
    before = threading.active_count()
    for i in range(50):
        swap_log.event(Tick(float(i)), 0)
        if i % 7 == 0:
            swap_log.flush()
    swap_log.close()
    assert path.read_bytes().splitlines() == [render(record) for record in subscriber.records]
    assert seqs(path) == list(range(1, 51))
    assert threading.active_count() == before - 1


# --- the file ----------------------------------------------------------------------------


class Watched(SwapLogFile):
    """`wait(n)` returns when n batches have been tried."""

    def __init__(self, path: Path, max_bytes: int = 1 << 20) -> None:
        self._tried = threading.Semaphore(0)
        super().__init__(path, max_bytes, AGE)

    def _append(self, lines: list[bytes]) -> None:
        try:
            super()._append(lines)
        finally:
            self._tried.release()

    def wait(self, n: int) -> None:
        for _ in range(n):
            self._tried.acquire()


def test_a_file_that_cannot_be_written_drops_lines_counts_them_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    path = folder / "swap-log.jsonl"
    file = Watched(path)
    file.write([line(1), line(2)])
    file.write([line(3)])
    file.wait(2)
    folder.mkdir()
    file.write([line(4), line(5)])
    file.write([line(6)])
    file.close()
    records = [parse(text) for text in path.read_bytes().splitlines()]
    assert [(record.seq, record.dropped) for record in records] == [
        (4, 3),
        (4, 0),
        (5, 0),
        (6, 0),
    ]
    assert records[0] == Record(4, 0, 1.5, dropped=3)
    assert file.lost == 3


def test_a_full_disk_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "swap-log.jsonl"
    path.symlink_to("/dev/full")
    file = Watched(path)
    file.write([line(1)])
    file.write([line(2)])
    file.wait(2)
    path.unlink()
    file.write([line(3)])
    file.close()
    assert [parse(text).dropped for text in path.read_bytes().splitlines()] == [2, 0]


def test_a_disk_with_room_for_half_a_batch_gets_none_of_it() -> None:
    output_of(Path(__file__).parent / "programs" / "full_disk.py")


async def test_subscribers_miss_nothing_when_the_file_does(
    tmp_path: Path, subscriber: Subscriber
) -> None:
    path = tmp_path / "gone" / "swap-log.jsonl"
    swap_log = SwapLog(SwapLogFile(path, 1 << 20, AGE), subscriber, asyncio.get_running_loop())
    for i in range(10):
        swap_log.event(Tick(float(i)), 0)
        swap_log.flush()
    swap_log.close()
    assert [record.seq for record in subscriber.records] == list(range(1, 11))
    assert not path.exists()


def test_what_a_crash_left_half_written_does_not_swallow_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "swap-log.jsonl"
    path.write_bytes(line(1) + b"\n" + line(2)[:9])
    file = SwapLogFile(path, 1 << 20, AGE)
    file.write([line(3)])
    file.write([line(4)])
    file.close()
    assert path.read_bytes().splitlines() == [line(1), line(2)[:9], line(3), line(4)]


# --- rotation ----------------------------------------------------------------------------


def test_rotation_keeps_one_old_file_and_whole_lines(tmp_path: Path) -> None:
    path, limit = tmp_path / "swap-log.jsonl", 2000
    file = SwapLogFile(path, limit, AGE)
    for seq in range(1, 101):
        file.write([line(seq, width=seq)])
    file.close()
    old = tmp_path / "swap-log.jsonl.1"
    assert sorted(tmp_path.iterdir()) == [path, old]
    assert path.stat().st_size <= limit
    assert old.stat().st_size <= limit
    kept = seqs(old) + seqs(path)
    assert kept == list(range(kept[0], 101)), "what is kept has no gap"
    assert len(seqs(old)) > 5


def test_a_batch_is_never_split_by_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "swap-log.jsonl"
    file = SwapLogFile(path, 1000, AGE)
    file.write([line(1)])
    file.write([line(seq, width=100) for seq in range(2, 20)])
    file.write([line(20)])
    file.close()
    assert seqs(tmp_path / "swap-log.jsonl.1") == list(range(2, 20))
    assert seqs(path) == [20]


def test_a_file_is_rotated_when_its_first_record_is_too_old(tmp_path: Path) -> None:
    path = tmp_path / "swap-log.jsonl"
    now = time.time()  # noqa: TID251
    made = Record(1, 0, now - 3600.0, action=DropHostCopy(1, "a"))
    path.write_bytes(render(made) + b"\n")
    for age, seqs_now in ((7200.0, [1, 2]), (1800.0, [3]), (1800.0, [3, 4])):
        file = SwapLogFile(path, 1 << 20, age)
        seq = seqs_now[-1]
        file.write([render(Record(seq, 0, now, action=DropHostCopy(1, "a")))])
        file.close()
        assert seqs(path) == seqs_now
    assert seqs(tmp_path / "swap-log.jsonl.1") == [1, 2]


def test_a_clock_that_was_set_after_the_start_rotates_nothing(tmp_path: Path) -> None:
    """The times of all records are from the clock as it was at the start."""
    path = tmp_path / "swap-log.jsonl"
    before = time.time() - 86400.0  # noqa: TID251
    file = SwapLogFile(path, 1 << 20, 3600.0)
    for seq in (1, 2, 3):
        file.write([render(Record(seq, 0, before + seq, action=DropHostCopy(1, "a")))])
    file.close()
    assert seqs(path) == [1, 2, 3]


@pytest.mark.parametrize(
    "first", [b"", b"{", b"\xff" * 400, b'{"seq":1,"t":1e9}', b'{"seq":1,"t":1.2.3,"type":']
)
def test_a_file_that_does_not_say_when_it_began_is_as_old_as_it_was_written(
    tmp_path: Path, first: bytes
) -> None:
    path = tmp_path / "swap-log.jsonl"
    path.write_bytes(first + b"\n")
    os.utime(path, (0.0, 0.0))
    file = SwapLogFile(path, 1 << 20, 3600.0)
    last = render(Record(2, 0, 3601.0, action=DropHostCopy(1, "a")))
    file.write([last])
    file.close()
    assert path.read_bytes() == last + b"\n"


# --- reading back ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"\x00\x00",
        b'{"seq":1}',
        line(2).replace(b"drop", b"d\xffop"),
        line(2).replace(b'name":""', b'name":"\xff"'),
        line(2)[:-1] + b',"later":' + b"[" * 50_000,
    ],
    ids=range(7),
)
def test_a_damaged_line_costs_nobody_but_itself(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "swap-log.jsonl"
    path.write_bytes(b"\n".join([line(1), damaged, line(3), b""]))
    assert [found.record.seq for found in reader.read(path)] == [1, 3]


# --- a disk that hangs -------------------------------------------------------------------


def read_all(fd: int, last: int) -> list[Record]:
    """The records from a pipe, up to the one with that number."""
    data = b""
    while True:
        data += os.read(fd, 1 << 20)
        found = [parse(text) for text in data.splitlines(keepends=True) if text.endswith(b"\n")]
        if found and found[-1].seq == last:
            return found


def test_what_a_hung_disk_does_not_take_is_bounded_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(swap_log_module, "QUEUE_MAX_BYTES", 1 << 20)
    path = tmp_path / "swap-log.jsonl"
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR)
    try:
        file = SwapLogFile(path, 1 << 40, AGE)
        total = 4000
        for seq in range(1, total + 1):
            file.write([line(seq, width=1000)])  # never blocks
            assert file._queued_bytes <= 1 << 20
        records = read_all(end, total)
        file.close()
    finally:
        os.close(end)
    dropped = sum(record.dropped for record in records)
    assert dropped == file.lost > 0
    kept = [record.seq for record in records if not record.dropped]
    assert dropped + len(kept) == total
    assert kept == sorted(kept)
    assert caplog.text.count("too slow") == 1


def test_a_hung_disk_does_not_keep_the_end_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(swap_log_module, "CLOSE_S", 0.05)
    path = tmp_path / "swap-log.jsonl"
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR)
    try:
        file = SwapLogFile(path, 1 << 40, AGE)
        file.write([line(seq, width=1000) for seq in range(1, 1000)])
        file.close()
        assert "hangs" in caplog.text
        read_all(end, 999)  # so that its thread ends
        file._thread.join()
    finally:
        os.close(end)


@pytest.mark.parametrize("odd", ["\udcff", 1j], ids=["no text", "no data"])
async def test_a_record_that_cannot_be_written_is_counted_and_the_others_are(
    swap_log: SwapLog, subscriber: Subscriber, caplog: pytest.LogCaptureFixture, odd: Any
) -> None:
    swap_log.action(DropHostCopy(1, "a"), 0, 1.0)
    swap_log.action(DropHostCopy(2, odd), 0, 1.0)
    swap_log.action(DropHostCopy(3, "b"), 0, 1.0)
    swap_log.flush()
    assert [(record.seq, record.dropped) for record in subscriber.records] == [
        (1, 0),
        (2, 1),
        (3, 0),
    ]
    assert "DropHostCopy" in caplog.text
