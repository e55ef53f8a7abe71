"""Views of the swap log: lines for people, or the records as they are."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from rich.text import Text

from swapd.cli.common import console, shown_json
from swapd.cli.passes import Folding
from swapd.cli.render import line
from swapd.log.history import Filter, Seen
from swapd.log.reader import LogLine
from swapd.log.records import Record

T = TypeVar("T")


class LogView(Protocol):
    """Shows the lines of a log, in order."""

    @property
    def keeps_back(self) -> bool:
        """Whether it holds lines back until more records come, or none do."""

    def show(
        self, lines: Iterable[LogLine], last: int | None = None, *, more: bool = False
    ) -> None:
        """Show them, or only the `last` so many. `more`: others follow soon."""


class TextView:
    """Lines for people, coloured on a terminal."""

    def __init__(self, only: Filter, everything: bool, *, fold: bool) -> None:
        self._only = only
        self._everything = everything
        self._folding = Folding() if fold else None
        self._seen = Seen()

    def show(
        self, lines: Iterable[LogLine], last: int | None = None, *, more: bool = False
    ) -> None:
        """While `more` follow, it may hold back an unfinished pass."""
        for shown in _tail(self._rendered(lines, more), last):
            console.print(shown, soft_wrap=True)

    @property
    def keeps_back(self) -> bool:
        return self._folding is not None and self._folding.open

    def _rendered(self, lines: Iterable[LogLine], more: bool) -> Iterator[Text]:
        for _, record in lines:
            if record.start is not None:
                yield from self._flushed()
                self._seen = Seen()
            if self._only.wants(record, self._seen):
                yield from self._said(record)
            self._seen.note(record)
        if not more:
            yield from self._flushed()

    def _said(self, record: Record) -> Iterator[Text]:
        if self._folding is not None:
            yield from self._folding.lines(record, self._seen)
        elif shown := line(record, self._seen, everything=self._everything):
            yield shown

    def _flushed(self) -> Iterator[Text]:
        if self._folding is not None:
            yield from self._folding.flush(self._seen)


class JsonView:
    """The records as they are, one a line."""

    keeps_back = False

    def __init__(self, only: Filter) -> None:
        self._only = only
        self._seen = Seen()

    def show(
        self, lines: Iterable[LogLine], last: int | None = None, *, more: bool = False
    ) -> None:
        for raw, _ in _tail(self._wanted(lines), last):
            sys.stdout.buffer.write(shown_json(raw) + b"\n")
        sys.stdout.buffer.flush()

    def _wanted(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        if self._only == Filter():
            yield from lines
            return
        for each in lines:
            if each.record.start is not None:
                self._seen = Seen()
            if self._only.wants(each.record, self._seen):
                yield each
            self._seen.note(each.record)


def _tail(items: Iterable[T], last: int | None) -> Iterable[T]:
    return items if last is None else deque(items, maxlen=last)
