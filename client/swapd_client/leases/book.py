"""State of each lease, and its changes.

A lease is held. After its release it may be kept, and held again (`keeping.py`); or it ends,
perhaps after the GPU work under it. Then it is over. Pure: no clock, thread, socket or memory. Not
thread-safe.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from swapd.shared.protocol import Granted
from swapd_client.leases.agents import Agent, Agents
from swapd_client.session.processor import Work

#: A slot of the board, and the value that its word reaches on arrival.
Word = tuple[int, int]


class Record:
    """One lease, from its grant on. Each of its parts occurs once."""

    __slots__ = (
        "again",
        "agent",
        "awaited",
        "cut",
        "ends_at_once",
        "given_up",
        "granted",
        "is_workspace",
        "lingers",
        "may_be_kept",
        "names",
        "outdated",
        "state",
        "streams",
        "transient",
        "untold_since",
        "work",
    )

    def __init__(
        self,
        granted: Granted,
        names: tuple[str, ...],
        agent: Agent,
        *,
        is_workspace: bool = False,
        ends_at_once: bool = False,
    ) -> None:
        """`ends_at_once`: a release waits for nothing, and has nothing else to do."""
        self.granted = granted
        #: The names requested.
        self.names = names
        self.agent = agent
        #: Whether it is memory for the process's own allocator.
        self.is_workspace = is_workspace
        self.ends_at_once = ends_at_once
        #: Whether it may stay held for a moment after its release, unknown to the daemon.
        self.may_be_kept = False
        #: Whether its own thread may tell the daemon when the GPU work is done.
        self.lingers = False
        #: Whether a part of it leaves the device at the release.
        self.transient = any(place.transient for place in granted.placements)
        #: "ending": released, and waiting for the GPU work under it. "released": waiting for
        #: nothing.
        self.state: Literal["granted", "held", "ending", "released", "over"] = "granted"
        #: Whether it holds the bytes from before an update.
        self.outdated = False
        #: Whether the acquire was cancelled while its components were loading.
        self.given_up = False
        #: The words that streams were told to wait for.
        self.awaited: list[Word] = []
        #: Whether streams went on without the words they waited for, because the session ended.
        self.cut = False
        #: Streams, besides the current ones, whose work under the lease is not marked yet.
        self.streams: dict[int, None] = {}
        #: Marked GPU work that was not done at the mark, of the latest step and of those before.
        self.work: Work | None = None
        #: How often it was handed out again without a message; and since when the daemon was not
        #: told.
        self.again = 0
        self.untold_since: float | None = None

    @property
    def id(self) -> int:
        """The daemon's id of the lease, unique in the session."""
        return self.granted.id

    def holds(self, name: str) -> bool:
        """Whether a component of this process is part of it."""
        return any(place.name == name for place in self.granted.placements)


class Book:
    """The leases of one session that are not over."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self.agents = Agents()
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
        self.agents.took(record.agent)
        # the daemon sent the grant before it committed the update
        record.outdated = any(record.id <= last for last in renewed)

    def renewed(self, name: str) -> None:
        """After an update, leases of the component hold the old bytes."""
        for record in self._records.values():
            record.outdated |= record.holds(name)

    def released(self, record: Record, *, late: bool) -> None:
        """The holder released it; it ends now, or after the GPU work under it."""
        self.agents.released(record.agent, late=late)
        record.state = "ending" if late else "released"
        if late:
            self._ending.add(record.id)

    def ended(self, record: Record) -> None:
        """The GPU work after its release is done."""
        self.agents.ended(record.agent)
        self._ending.discard(record.id)
        self.over(record)

    def over(self, record: Record) -> bool:
        """The lease is over, for the daemon too or without one; return whether it was held until
        then.
        """
        record.awaited.clear()
        record.state = "over"
        return self._records.pop(record.id, None) is not None

    def is_ending(self, lease: int) -> bool:
        """Whether a released lease waits for GPU work, or the daemon still counts it as held."""
        return lease in self._ending

    def cut(self, is_there: Callable[[Word], bool]) -> None:
        """The session ends: streams go on, even if the awaited words have not come."""
        for record in self._records.values():
            record.cut |= not all(map(is_there, record.awaited))
