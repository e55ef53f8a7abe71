"""The last lines of a swap log as it grows, for `swapd top` and the page."""

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from swapd.cli.render import Phrase, say
from swapd.core import actions, events
from swapd.log.history import RecordContext
from swapd.log.reader import Tail
from swapd.log.records import Record, SchemaMismatch
from swapd.shared import protocol
from swapd.shared.protocol import SessionStatus

#: Most bytes read at once. Older records are skipped, which bounds the cost of busy daemons.
READ_BYTES = 256 << 10


class LogEntry(NamedTuple):
    seq: int
    time: float
    said: Phrase


class LastLines:
    """The last records that people follow: loads, evictions, waits, refusals. For one thread."""

    def __init__(self, path: Path, most: int) -> None:
        self.lines: deque[LogEntry] = deque(maxlen=most)
        self._tail = Tail(path, READ_BYTES)
        self._seen = RecordContext()

    def read(self, sessions: Iterable[SessionStatus] = ()) -> None:
        """Add the new records, if the file can be read. Blocks for the disk.

        `sessions`: of the daemon; their labels may be older than the part of the log read here.
        """
        with suppress(OSError, SchemaMismatch):
            fresh = self._tail.read()
            for session in sessions:
                self._seen.labels.setdefault(session.session, session.label)
            for _, record in fresh:
                if record.start is not None:
                    self._seen = RecordContext()
                    self.lines.clear()
                if not is_everyday(record) and (said := say(record, self._seen)).swap:
                    self.lines.append(LogEntry(record.seq, record.time, said))
                self._seen.note(record)

    def close(self) -> None:
        self._tail.close()


def is_everyday(record: Record) -> bool:
    """Tell whether people skip this record: thousands of such records may come in a second."""
    match record.event or record.action:
        case events.SessionRequest(
            request=protocol.Acquire() | protocol.Release() | protocol.Cancel()
        ):
            return True
        case actions.Grant(waited_s=waited_s):
            return not waited_s
        case events.Tick() | actions.Accept() | actions.SendWanted() | actions.SendHurry():
            return True
        case _:
            return False
