"""Finds records of the last run by their numbers, without reading all records before them.

A reader that missed some comes back for them while more arrive, so this must not take longer in a
larger log. Numbers grow along the file, so bisection finds the place.
"""

import os
from pathlib import Path
from typing import BinaryIO

from swapd.log.history import Line, parsed

#: Only the first record of a run contains this: inside a string the quotes would be escaped.
_START = b'"type":"start"'
_SEQ = b'{"seq":'


def between(path: Path, after: int, before: int) -> list[Line]:
    """The records of the last run with numbers between `after` and `before`, both excluded.

    A `dropped` with number `before` is included. Raises: OSError.
    """
    found: list[Line] = []

    def is_between(line: Line) -> bool:
        return after < line.record.seq < before + bool(line.record.dropped)

    for data in _last_run(path):
        at = _place_of(data, after + 1)
        end = _place_of(data, before + 1, at)
        found += filter(is_between, parsed(data[at:end].split(b"\n")))
    return found


def _last_run(path: Path) -> list[bytes]:
    """Whole lines of the last run, those of the rotated file first."""
    with path.open("rb") as file:
        now = _whole(file)
        if (start := now.rfind(_START)) >= 0:
            return [now[now.rfind(b"\n", 0, start) + 1 :]]
        try:
            with path.with_name(path.name + ".1").open("rb") as before:
                if os.path.sameopenfile(file.fileno(), before.fileno()):
                    return [now]  # a rotation came between
                old = _whole(before)
        except FileNotFoundError:
            return [now]
    start = old.rfind(_START)
    return [old[old.rfind(b"\n", 0, max(start, 0)) + 1 :], now]


def _whole(file: BinaryIO) -> bytes:
    data = file.read()
    return data[: data.rfind(b"\n") + 1]


def _place_of(data: bytes, seq: int, low: int = 0) -> int:
    """Offset of the first line whose number is at least `seq`."""
    high = len(data)
    while low < high:
        middle = data.rfind(b"\n", low, (low + high) // 2) + 1 or low
        number, end = _number(data, middle)
        if number is None or number < seq:
            low = end
        else:
            high = middle
    return low


def _number(data: bytes, at: int) -> tuple[int | None, int]:
    """The number of the line at `at`, and the offset of the next line."""
    end = data.find(b"\n", at) + 1 or len(data)
    head = data[at : min(at + 40, end)]
    digits = head.removeprefix(_SEQ).partition(b",")[0]
    return (int(digits) if head.startswith(_SEQ) and digits.isdigit() else None), end
