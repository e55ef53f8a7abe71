"""The state of a run from its records, for a live view. Pure: records in.

A view that falls behind skips records, and a late one has not seen the first. Then the daemon's
status (`told`) corrects the picture.
"""

from collections import deque
from typing import Literal, NamedTuple

from swapd.cli.render import Said, say
from swapd.core import actions, events
from swapd.log.history import copied_bytes
from swapd.log.picture import Picture
from swapd.log.records import Record
from swapd.shared import protocol
from swapd.shared.protocol import StatusReply

#: Most lines of the log that it keeps.
LINES_MAX = 200

Direction = Literal["in", "out"]


class Transfer(NamedTuple):
    """A copy that was ordered and has not ended. Bytes, seconds."""

    name: str
    direction: Direction
    nbytes: int
    #: The start of its copy, as far as known; None: it waits for others.
    since: float | None
    #: Speed of the last copy in this direction; None before the first.
    bytes_per_s: float | None

    def done(self, now: float) -> float | None:
        """The share copied by now, at the speed of the last copy; None if that is unknown."""
        if self.since is None:
            return 0.0
        if self.bytes_per_s is None:
            return None
        elapsed = max(now - self.since, 0.0)
        return min(elapsed * self.bytes_per_s / self.nbytes, 0.99) if self.nbytes else 0.99


class Watch:
    """Call `note` with each record of a run, in order; then read it."""

    def __init__(self) -> None:
        self.picture = Picture()
        #: The daemon's last status, and its time (Unix time).
        self.status: StatusReply | None = None
        self.told_at = 0.0
        #: The last records for people, with their time.
        self.said: deque[tuple[float, Said]] = deque(maxlen=LINES_MAX)
        self._speed: dict[Direction, float] = {}
        #: The end of the last copy in each direction: copies of one direction run one by one.
        self._ended: dict[Direction, float] = {"in": 0.0, "out": 0.0}

    def note(self, record: Record) -> None:
        """Take the next record; count those missing before it."""
        if record.dropped:
            return  # the numbers show it, too
        last = self.picture.seq
        if record.seq > last + 1:
            self.picture.missed(record.seq - last - 1 if last else 0)
        if not _is_everyday(record):
            said = say(record, self.picture.seen)
            if said.swap:
                self.said.append((record.time, said))
        self._note_copy(record)
        self.picture.note(record)

    def told(self, status: StatusReply, now: float, *, quiet: bool = False) -> None:
        """Take the daemon's status at `now`. `quiet`: no record came meanwhile, so the status is
        that after the last record."""
        self.status, self.told_at = status, now
        for session in status.sessions:
            self.picture.seen.labels.setdefault(session.session, session.label)
        if not self.picture.seq:
            self.picture.uncertain = True  # no record yet
        uncertain, self.picture.uncertain = self.picture.uncertain, self.picture.uncertain or quiet
        self.picture.correct(status)
        self.picture.uncertain = uncertain

    def transfers(self) -> list[Transfer]:
        """The copies under way, and those that wait."""
        found = []
        busy: set[Direction] = set()
        for order, began in self.picture.seen.copies.values():
            if not isinstance(order, actions.CopyIn | actions.CopyOut):
                continue
            direction: Direction = "in" if isinstance(order, actions.CopyIn) else "out"
            since = None if direction in busy else max(began, self._ended[direction])
            busy.add(direction)
            speed = self._speed.get(direction)
            found.append(Transfer(order.name, direction, copied_bytes(order), since, speed))
        return found

    def _note_copy(self, record: Record) -> None:
        e = record.event
        if not isinstance(e, events.CopiedIn | events.CopiedOut | events.CopyFailed):
            return
        order, began = self.picture.seen.copies.get(e.generation, (None, 0.0))
        if not isinstance(order, actions.CopyIn | actions.CopyOut):
            return
        direction: Direction = "in" if isinstance(order, actions.CopyIn) else "out"
        took = record.time - max(began, self._ended[direction])
        if took > 0 and copied_bytes(order) and not isinstance(e, events.CopyFailed):
            self._speed[direction] = copied_bytes(order) / took
        self._ended[direction] = record.time


def _is_everyday(record: Record) -> bool:
    """Whether people skip it: thousands of such records may come in a second."""
    match record.event or record.action:
        case events.Asked(request=protocol.Acquire() | protocol.Release() | protocol.Cancel()):
            return True
        case actions.Grant(waited_s=waited_s):
            return not waited_s
        case events.Tick() | actions.Accept() | actions.Want() | actions.Hurry():
            return True
        case _:
            return False
