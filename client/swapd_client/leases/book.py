"""The state of each lease, and its changes.

After its release a lease may be kept and held again (`cache.py`). Otherwise it ends, perhaps after
the GPU work under it, and is over. Pure: no clock, thread, socket or memory. Not thread-safe.
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
    """One lease, from its request on. No component occurs twice in it."""

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
        """`number`: of the request, then of the lease. `ends_at_once`: a release waits for
        nothing.
        """
        self.id = number
        self.granted = NOT_GRANTED
        self.names = names
        #: The thread or task that holds the lease, for the daemon.
        self.agent = agent
        #: Whether the lease is memory for the process's own allocator.
        self.is_workspace = is_workspace
        self.ends_at_once = ends_at_once
        #: Whether another object releases the lease, so that no warning is due if it becomes
        #: garbage.
        self.is_answered_for = False
        #: Whether the components leave at the end, and this process has unmapped them.
        self.is_unmapped = False
        self.may_be_kept = False
        #: "ending": released, waits for the GPU work under it. "released": waits for nothing.
        self.state: Literal["granted", "held", "ending", "released", "over"] = "granted"
        #: Whether the lease holds the bytes from before an update.
        self.outdated = False
        #: Whether the thread has offered the lease in a request: the daemon may have ended it.
        self.offered = False
        self.given_up = False
        #: Words that streams wait for.
        self.awaited: list[Word] = []
        #: Whether streams went on without these words, because the session ended.
        self.cut = False
        #: Streams, besides the current one, with unmarked work under the lease.
        self.streams: dict[int, None] = {}
        #: Streams that are never destroyed, with unmarked work up to the latest release.
        self.queued: dict[int, None] = {}
        #: Marked GPU work that may still run.
        self.work: Work | None = None
        #: Whether an interrupt may have left GPU work without a mark.
        self.unmarked = False
        #: Uses without a message; end of the last use; gap before that use; the daemon's last news
        #: of the lease.
        self.again = 0
        self.since = inf
        self.gap_s = inf
        self.told_at = 0.0
        #: The message that ends the lease; whether the daemon has it.
        self.release: Release | None = None
        self.told = False

    @property
    def is_asked(self) -> bool:
        """Whether the lease is requested, but not granted yet."""
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
    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        #: Released leases that wait for GPU work, or that the daemon still counts as held.
        self._ending: set[int] = set()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def granted(self, record: Record, renewed: Iterable[int]) -> None:
        """Record a granted lease.

        `renewed`: for each component, the last request that may have got the bytes from before an
        update.
        """
        self._records[record.id] = record
        record.state = "held"
        record.outdated = any(record.id <= last for last in renewed)

    def renewed(self, name: str) -> None:
        """Mark the component's leases: after an update, they hold the old bytes."""
        for record in self._records.values():
            record.outdated |= record.holds(name)

    def released(self, record: Record, *, late: bool) -> None:
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
        return lease in self._ending

    def cut(self, is_there: Callable[[Word], bool]) -> None:
        """Note which leases' streams go on without their words: the session ends."""
        for record in self._records.values():
            record.cut |= not all(map(is_there, record.awaited))
