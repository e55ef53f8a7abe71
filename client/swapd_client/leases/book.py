"""State of each lease, and its changes.

A lease is held. After its release it may be kept, and held again (`cache.py`); or it ends,
perhaps after the GPU work under it. Then it is over. Pure: no clock, thread, socket or memory. Not
thread-safe.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from math import inf
from typing import Literal

from swapd.shared.protocol import Granted, Release
from swapd_client.session.processor import Work

#: A slot of the board, and the value that its word reaches on arrival.
Word = tuple[int, int]

NOT_GRANTED = Granted(0, ())


class Record:
    """One lease, from its request on. Each of its parts occurs once."""

    __slots__ = (
        "again",
        "agent",
        "awaited",
        "cut",
        "ends_at_once",
        "gap_s",
        "given_up",
        "granted",
        "id",
        "is_answered_for",
        "is_unmapped",
        "is_workspace",
        "may_be_kept",
        "names",
        "offered",
        "outdated",
        "queued",
        "release",
        "since",
        "state",
        "streams",
        "told",
        "told_at",
        "unmarked",
        "work",
    )

    def __init__(
        self,
        number: int,
        names: tuple[str, ...],
        agent: int,
        *,
        is_workspace: bool = False,
        ends_at_once: bool = False,
    ) -> None:
        """`number`: of the request, and then of the lease. `ends_at_once`: a release waits for
        nothing, and has nothing else to do.
        """
        self.id = number
        self.granted = NOT_GRANTED
        #: The names requested.
        self.names = names
        #: The number of its thread or task, for the daemon.
        self.agent = agent
        #: Whether it is memory for the process's own allocator.
        self.is_workspace = is_workspace
        self.ends_at_once = ends_at_once
        #: Whether another object releases it if it becomes garbage, without a warning.
        self.is_answered_for = False
        #: Whether its components leave at its end, and this process has unmapped them.
        self.is_unmapped = False
        #: Whether it may be kept after its release, unknown to the daemon.
        self.may_be_kept = False
        #: "ending": released, and waiting for the GPU work under it. "released": waiting for
        #: nothing.
        self.state: Literal["granted", "held", "ending", "released", "over"] = "granted"
        #: Whether it holds the bytes from before an update.
        self.outdated = False
        #: Whether its thread has named it in a request, so the daemon may have ended it.
        self.offered = False
        #: Whether the acquire was cancelled while its components were loading.
        self.given_up = False
        #: The words that streams were told to wait for.
        self.awaited: list[Word] = []
        #: Whether streams went on without the words they waited for, because the session ended.
        self.cut = False
        #: Streams, besides the current ones, whose work under the lease is not marked yet.
        self.streams: dict[int, None] = {}
        #: Streams that are never destroyed, whose work up to the latest release is not marked yet.
        self.queued: dict[int, None] = {}
        #: Marked GPU work that was not done at the mark, of the latest step and of those before.
        self.work: Work | None = None
        #: Whether GPU work under it may be without a mark, because something was interrupted.
        self.unmarked = False
        #: How often it was used again without a message; the end of its last use; the time from
        #: there to the next one; the time when the daemon heard of it.
        self.again = 0
        self.since = inf
        self.gap_s = inf
        self.told_at = 0.0
        #: The message that ends it, once made; and whether the daemon has it.
        self.release: Release | None = None
        self.told = False

    @property
    def is_asked(self) -> bool:
        """Whether it was requested and not granted yet."""
        return self.granted is NOT_GRANTED

    @property
    def is_usable(self) -> bool:
        """Whether its holder may use it again without asking the daemon."""
        return self.state == "held" and not (self.outdated or self.offered)

    def has_any(self, names: Collection[str]) -> bool:
        return not set(self.granted.names or self.names).isdisjoint(names)

    def holds(self, name: str) -> bool:
        return any(place.name == name for place in self.granted.placements)


class Book:
    """The leases of one session that are not over."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        #: Leases that were released, and wait for GPU work, or that the daemon still counts as
        #: held.
        self._ending: set[int] = set()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def granted(self, record: Record, renewed: Iterable[int]) -> None:
        """A lease is held.

        `renewed`: for each of its parts, the last request to which the daemon may have granted the
        bytes from before an update.
        """
        self._records[record.id] = record
        record.state = "held"
        # the daemon sent the grant before it committed the update
        record.outdated = any(record.id <= last for last in renewed)

    def renewed(self, name: str) -> None:
        """After an update, leases of the component hold the old bytes."""
        for record in self._records.values():
            record.outdated |= record.holds(name)

    def released(self, record: Record, *, late: bool) -> None:
        """The holder released it; it ends now, or after the GPU work under it."""
        record.state = "ending" if late else "released"
        if late:
            self._ending.add(record.id)

    def ended(self, record: Record) -> None:
        self._ending.discard(record.id)
        self.over(record)

    def over(self, record: Record) -> None:
        record.awaited.clear()
        record.state = "over"
        self._records.pop(record.id, None)

    def is_ending(self, lease: int) -> bool:
        """Whether a released lease waits for GPU work, or the daemon still counts it as held."""
        return lease in self._ending

    def cut(self, is_there: Callable[[Word], bool]) -> None:
        """The session ends: streams go on, even if the awaited words have not come."""
        for record in self._records.values():
            record.cut |= not all(map(is_there, record.awaited))
