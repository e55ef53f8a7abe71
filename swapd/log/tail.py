"""The swap log's file as it grows: each record once, across rotations, and missing ones counted."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from swapd.log.history import LogLine, Reader
from swapd.log.records import Record, render


class Tail:
    """The records of a log in order. For one thread."""

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        """`most_bytes`: how much of the current file one `read` has, the first one too; it skips
        what is before that. None: all, and first the rotated file."""
        self._path = path
        self._old = path.with_name(path.name + ".1")
        self._most_bytes = most_bytes
        self._file: BinaryIO | None = None
        #: The beginning of a line that is not complete yet.
        self._begun = b""
        self._reader = Reader()
        self._last = 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> list[LogLine]:
        """The records since the last call. A record `dropped` counts those that the file lacks.

        Raises: OSError; OtherSchema if they are in another schema.
        """
        found: list[LogLine] = []
        if self._file is None and not self._open_first():
            return found
        found += self._numbered(self._grown())
        while self._go_on():
            found += self._numbered(self._grown())
        if self._reader.other is not None:
            raise self._reader.other
        return found

    def _open_first(self) -> bool:
        for path in (self._old, self._path) if self._most_bytes is None else (self._path,):
            with suppress(FileNotFoundError):
                self._file = path.open("rb")
                return True
        return False

    def _go_on(self) -> bool:
        """Whether the log goes on in another file: go to it. The current one is complete then."""
        assert self._file is not None
        own = os.fstat(self._file.fileno())
        now, old = _inode(self._path), _inode(self._old)
        if now == own.st_ino or now is None:
            return False
        following = self._path if old in (own.st_ino, None) else self._old
        try:
            file = following.open("rb")
        except FileNotFoundError:
            return False  # it is about to be made
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
            self._file.seek(0)  # somebody has emptied it
        elif self._most_bytes is not None and size - at > self._most_bytes:
            self._file.seek(size - self._most_bytes - 1)
            self._file.readline()
            self._begun, self._last = b"", 0
        whole, end, self._begun = (self._begun + self._file.read()).rpartition(b"\n")
        return self._reader.read((whole + end).split(b"\n"))

    def _numbered(self, lines: Iterator[LogLine]) -> Iterator[LogLine]:
        """The same, with a record that counts the missing ones before the next."""
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


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
