"""What each lease is, and what becomes of it with everything that happens.

A lease is held; it may be kept when it is given back, and be held again (`keeping.py`); then it
ends, or waits for the work under it first; then it is over. Pure: no clock, no thread, no socket,
no memory. Not thread-safe.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from swapd.shared.protocol import Granted
from swapd_client.leases.agents import Agent, Agents
from swapd_client.session.processor import Work

#: Of a board: slot, and what its word reaches when what is waited for is there.
Word = tuple[int, int]


class Record:
    """One lease, from its grant on: all that is known of it. Its parts are named once each."""

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
        """`ends_at_once`: a release has nothing to wait for, and nothing else to do."""
        self.granted = granted
        #: What was asked for.
        self.names = names
        self.agent = agent
        #: It is memory for the process's own allocator.
        self.is_workspace = is_workspace
        self.ends_at_once = ends_at_once
        #: Whether it may stay held for a moment after its release, unseen by the daemon.
        self.may_be_kept = False
        #: Whether its thread may itself see to it that the daemon hears when the work is done.
        self.lingers = False
        #: Whether some of it leaves the device with it.
        self.transient = any(place.transient for place in granted.placements)
        #: "ending": it was released, and waits for the work under it. "released": for nothing.
        self.state: Literal["granted", "held", "ending", "released", "over"] = "granted"
        #: It is on bytes from before an update.
        self.outdated = False
        #: Nobody waits any more for what is coming in under it.
        self.given_up = False
        #: What streams were told to wait for.
        self.awaited: list[Word] = []
        #: Streams went on without what they waited for, as the session ended.
        self.cut = False
        #: Beside the current ones, those whose work under it is to be waited for, and has not been
        #: marked.
        self.streams: dict[int, None] = {}
        #: What was marked, and not done then: by the latest step, and by those before.
        self.work: Work | None = None
        #: How often it was handed out again without a message; and since when the daemon has not
        #: heard of it.
        self.again = 0
        self.untold_since: float | None = None

    @property
    def id(self) -> int:
        """What the daemon calls it; no other lease of the session is called so."""
        return self.granted.id

    def holds(self, name: str) -> bool:
        """Whether a component of this process is part of it."""
        return any(place.name == name for place in self.granted.placements)


class Book:
    """The leases of one session, but for those that are over."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self.agents = Agents()
        #: Those that were released, and wait for the work under them, or have not been told of.
        self._ending: set[int] = set()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._records.values()))

    def granted(self, record: Record, renewed: Iterable[int]) -> None:
        """It is held. `renewed`: of its parts, up to which request the daemon may have granted what
        was there before an update."""
        self._records[record.id] = record
        record.state = "held"
        self.agents.took(record.agent)
        # on its way when the update was committed
        record.outdated = any(record.id <= last for last in renewed)

    def renewed(self, name: str) -> None:
        """An update took place: leases are on the old bytes."""
        for record in self._records.values():
            record.outdated |= record.holds(name)

    def released(self, record: Record, *, late: bool) -> None:
        """Its holder has done with it; it ends now, or when the work under it is done."""
        self.agents.released(record.agent, late=late)
        record.state = "ending" if late else "released"
        if late:
            self._ending.add(record.id)

    def ended(self, record: Record) -> None:
        """What it waited for after its release is done."""
        self.agents.ended(record.agent)
        self._ending.discard(record.id)
        self.over(record)

    def over(self, record: Record) -> bool:
        """The daemon is told of its end, or is no more; whether it was held until then."""
        record.awaited.clear()
        record.state = "over"
        return self._records.pop(record.id, None) is not None

    def is_ending(self, lease: int) -> bool:
        """Whether a lease that was released waits for the work under it, or the daemon has not
        heard of its end."""
        return lease in self._ending

    def cut(self, is_there: Callable[[Word], bool]) -> None:
        """The session ends: whatever streams wait for, they go on."""
        for record in self._records.values():
            record.cut |= not all(map(is_there, record.awaited))
