"""Reads the swap log's file, all of it or as it grows: each record once, across rotations."""

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from math import inf
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from swapd.log.records import Record, SchemaMismatch, parse, render
from swapd.shared.errors import UserError


class NoLog(UserError):
    """The file cannot be a swap log."""


class LogLine(NamedTuple):
    raw: bytes
    record: Record


class Reader:
    def __init__(self) -> None:
        #: Why the run at hand cannot be read, if it is in another schema.
        self.other: SchemaMismatch | None = None
        #: Number of lines in another schema.
        self.left_out = 0

    def read(self, lines: Iterable[bytes]) -> Iterator[LogLine]:
        for raw in lines:
            if (record := self._parse(raw)) is not None:
                yield LogLine(raw, record)

    def _parse(self, raw: bytes) -> Record | None:
        try:
            record = parse(raw)
        except SchemaMismatch as exc:
            self.other = exc
            self.left_out += 1
            return None
        except (msgspec.MsgspecError, ValueError, RecursionError):  # not UTF-8, or no record
            self.left_out += bool(raw) and self.other is not None
            return None
        if record.start is not None:
            self.other = None
        elif self.other is not None:
            self.left_out += 1
            return None
        return record


class Tail:
    """Reads the records of a log in order. For one thread."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        """`most_bytes`: a `read` skips all but the last so many bytes of the current file. None:
        read all, the rotated file first."""
        self._path = path
        self._old = path.with_name(path.name + ".1")
        self._most_bytes = most_bytes
        self._file: BinaryIO | None = None
        #: Start of an incomplete line.
        self._begun = b""
        self.reader = Reader()
        self._last = 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> list[LogLine]:
        """Return the records since the last call. A `dropped` record counts those that the file
        lacks. Raises: OSError; SchemaMismatch if the last run is in another schema."""
        found = list(self._numbered(self.lines()))
        if self.reader.other is not None:
            raise self.reader.other
        return found

    def lines(self) -> Iterator[LogLine]:
        """Yield the lines since the last call, also if the last run is in another schema. Raises:
        OSError."""
        if self._file is None and not self._open_first():
            return
        yield from self._grown()
        while self._go_on():
            yield from self._grown()

    def _open_first(self) -> bool:
        for path in (self._old, self._path) if self._most_bytes is None else (self._path,):
            with suppress(FileNotFoundError):
                self._file = path.open("rb")
                return True
        return False

    def _go_on(self) -> bool:
        """Finish the current file, and open the next; return whether there is one."""
        assert self._file is not None
        own, now, old = os.fstat(self._file.fileno()), _found(self._path), _found(self._old)
        if now is None or now.st_ino == own.st_ino:
            return False
        following = self._path
        # rotated twice; a file that was moved elsewhere leaves an older one there
        if old is not None and old.st_ino != own.st_ino and old.st_mtime_ns >= own.st_mtime_ns:
            following = self._old
        try:
            file = following.open("rb")
        except FileNotFoundError:
            return False  # about to be made
        self._begun += self._file.read()  # written before the rotation
        if self._begun and not self._begun.endswith(b"\n"):
            self._begun += b"\n"  # a line that a crash cut short
        self._file.close()
        self._file = file
        return True

    def _grown(self) -> Iterator[LogLine]:
        assert self._file is not None
        size, at = os.fstat(self._file.fileno()).st_size, self._file.tell()
        if size < at:
            self._file.seek(0)  # emptied by someone
        elif self._most_bytes is not None and size - at > self._most_bytes:
            self._file.seek(size - self._most_bytes - 1)
            self._file.readline()
            self._begun, self._last = b"", 0
        whole, end, self._begun = (self._begun + self._file.read()).rpartition(b"\n")
        return self.reader.read((whole + end).split(b"\n"))

    def _numbered(self, lines: Iterator[LogLine]) -> Iterator[LogLine]:
        """Put a record before each gap that counts what is missing there."""
        told = 0
        for line in lines:
            record = line.record
            if record.start is not None:
                self._last = record.seq - 1
            elif record.dropped:
                told += record.dropped
            elif self._last and (missing := record.seq - self._last - 1 - told) > 0:
                note = Record(record.seq, 0, record.time, dropped=missing)
                yield LogLine(render(note), note)
            yield line
            if not record.dropped:
                self._last, told = record.seq, 0


def _found(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def read_runs(path: Path) -> tuple[list[LogLine], Reader]:
    """Return all lines of a log, the rotated file's first, and their reader. Raises: OSError,
    NoLog.

    Leaves out lines that do not parse (cut short by a power failure, or of a later version's kind),
    an unfinished last line, and runs in another schema, even the last.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # raises if only the rotated file is there
        raise NoLog(f"{path} is no regular file, so no swap log: write what it gives into a file")
    with closing(Tail(path)) as tail:
        return list(tail.lines()), tail.reader


def read(path: Path) -> list[LogLine]:
    """As `read_runs`, but raises SchemaMismatch if the last run is in another schema."""
    lines, reader = read_runs(path)
    if reader.other is not None:
        raise reader.other
    return lines


def last_run(lines: Sequence[LogLine]) -> Sequence[LogLine]:
    """Return the lines of the latest daemon. A log can hold several runs, each numbered from 1."""
    return lines[_last_begin(lines, len(lines)) :]


def runs_since(lines: Sequence[LogLine], since: float) -> Sequence[LogLine]:
    """Return the run that went on at `since`, on the monotonic clock of this boot, and later
    ones."""
    first = end = len(lines)
    while end and _began(lines[first:end]) > since:
        first, end = _last_begin(lines, first), first
    return lines[first:]


def _last_begin(lines: Sequence[LogLine], end: int) -> int:
    for i in range(end - 1, 0, -1):
        if lines[i].record.start is not None or lines[i].record.seq < lines[i - 1].record.seq:
            return i
    return 0


def _began(run: Sequence[LogLine]) -> float:
    """Return when a run began, on the core's clock; inf if no record tells."""
    ago = (run[0].record.time - clock for _, r in run if (clock := clock_of(r)) is not None)
    return next(ago, inf)


def clock_of(record: Record) -> float | None:
    """Return the wall time at time 0 of the core's clock, as it was at the daemon's start: the wall
    clock may have been set since. None: only events tell."""
    return None if record.event is None else record.time - record.event.now
