"""The state of each lease. No clock, thread, socket or memory.

After its release a lease may be kept and held again (`cache.py`). Otherwise it ends, perhaps after
the GPU work under it, and is over.
"""

from collections.abc import Collection
from math import inf
from typing import Literal

import msgspec

from swapd.shared.protocol import Granted, Release
from swapd_client.session.processor import Work

#: A slot of the board, and the value that its word reaches on arrival.
Word = tuple[int, int]

NOT_GRANTED = Granted(0, ())


class Record(msgspec.Struct, eq=False):
    """One lease, from its request on. No component occurs twice in it."""

    #: Of the request, then of the lease.
    id: int
    names: tuple[str, ...]
    #: The thread or task that holds the lease, for the daemon.
    agent: int
    #: Whether the lease is memory for the process's own allocator.
    is_workspace: bool = False
    #: Whether a release waits for nothing.
    ends_at_once: bool = False
    granted: Granted = NOT_GRANTED
    #: Whether another object releases the lease, so that no warning is due if it becomes garbage.
    is_answered_for: bool = False
    #: Whether the components leave at the end, and this process has unmapped them.
    is_unmapped: bool = False
    may_be_kept: bool = False
    #: "ending": released, waits for the GPU work under it. "released": waits for nothing.
    state: Literal["granted", "held", "ending", "released", "over"] = "granted"
    #: Whether the lease holds the bytes from before an update.
    outdated: bool = False
    #: Whether the thread has offered the lease in a request: the daemon may have ended it.
    offered: bool = False
    given_up: bool = False
    #: Words that streams wait for.
    awaited: list[Word] = []
    #: Whether streams went on without these words, because the session ended.
    cut: bool = False
    #: Streams, besides the current one, with unmarked work under the lease.
    streams: dict[int, None] = {}
    #: Streams that are never destroyed, with unmarked work up to the latest release.
    queued: dict[int, None] = {}
    #: Marked GPU work that may still run.
    work: Work | None = None
    #: Whether an interrupt may have left GPU work without a mark.
    unmarked: bool = False
    #: Uses without a message; end of the last use; gap before that use; the daemon's last news of
    #: the lease.
    again: int = 0
    since: float = inf
    gap_s: float = inf
    told_at: float = 0.0
    #: The message that ends the lease; whether the daemon has it.
    release: Release | None = None
    told: bool = False

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
