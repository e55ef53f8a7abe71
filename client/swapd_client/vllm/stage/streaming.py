"""Stages that work on one request at the same time (`async_chunk: true`), by chunks.

A stage makes chunks, and the next one goes on with them. If both do not fit, they take turns: the
first gives way when the next one waits and has enough of one request to begin with, or when it has
finished. So the next one starts early; and as a request has to have twice as many each time, they
do not change places all the while. A stage that is small enough to stay beside the largest keeps
its lease, so that what goes for others is what others have done with.

Lives here: how much is enough, and who stays. Which chunks vllm-omni has sent is said by
`scheduler.py`.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from swapd.shared import vm
from swapd.shared.protocol import StatusReply
from swapd_client.errors import SwapdError
from swapd_client.vllm.stage.connection import Connection

log = logging.getLogger("swapd_client")

#: A stage that takes no step for so long has none to take, though chunks may be there: nobody
#: fetches them. Seconds; longer than a busy machine keeps a thread waiting.
IDLE_S = 1.0
#: For each request: so many looks for a chunk in vain, since one was there, and there is none.
LOOKS = 2


class Streaming:
    """Of a stage, or of one of its ranks. One that does not stream has this as well."""

    def __init__(self, connection: Connection, after: Sequence[str], chunks: int) -> None:
        """`after`: the stages that chunks go to; (): whoever waits. `chunks`: as in `Options`."""
        self._connection = connection
        self._after = after
        self._chunks = chunks
        #: How many chunks it has sent, by request in flight. None: nobody says it.
        self._sent: Callable[[], Mapping[str, int]] | None = None
        #: Whether it goes on with chunks of another stage's.
        self.receives = False
        #: How often it was looked for a chunk in vain, since one was there.
        self._in_vain = 0
        #: What was sent before this turn, or before it was last looked who waits.
        self._before: Mapping[str, int] = {}
        #: How much is enough of a request for which turns have ended; `chunks` of others.
        self._enough: dict[str, int] = {}
        #: The requests of which there was enough when the turn ended.
        self._ready: Sequence[str] = ()
        #: Whether it is small enough to stay in; None: nobody has looked yet.
        self._stays: bool | None = None
        #: Whether those that want its memory now have room beside it; None: nobody has looked yet.
        self._beside: bool | None = None

    def __repr__(self) -> str:
        return f"<Streaming of {self._connection.stage}: {self._chunks} chunks a turn>"

    def begin_with(self, sent: Callable[[], Mapping[str, int]], *, receives: bool) -> None:
        """The stage streams: `sent` says how many chunks of each request have gone on."""
        self._sent = sent if self._chunks else None
        self.receives = receives

    def looked(self, *, found: bool) -> None:
        """It was looked for a chunk. In a thread of vllm-omni's."""
        self._in_vain = 0 if found else self._in_vain + 1

    def may_go_on(self, in_flight: int, idle_s: float) -> bool:
        """Whether a chunk may be there for one of the requests in flight, though no step computes.

        `idle_s`: for how long none has.
        """
        if not (self.receives and in_flight) or idle_s >= IDLE_S:
            return False
        return self._in_vain < LOOKS * in_flight

    def patience_s(self, in_flight: int, idle_s: float) -> float:
        """How long a stage with requests in flight may take no step before it gives way.

        One that streams is a server's, which steps as long as it has any.
        """
        streams = self._sent is not None or self.receives
        return IDLE_S if streams and in_flight else idle_s

    def begin(self) -> None:
        """A turn begins."""
        self._beside = None
        if self._sent is not None:
            self._before = self._sent()

    def enough(self) -> bool:
        """Whether a stage that chunks go to waits, and has enough of a request to begin with.

        Between two steps of a turn that is wanted. Asks the daemon who waits, once for so many
        chunks.
        """
        if self._sent is None:
            return False
        sent, before = self._sent(), self._before
        ready = [
            one
            for one, n in sent.items()
            if n - before.get(one, 0) >= self._enough.get(one, self._chunks)
        ]
        if not ready:
            return False
        if not self._next_waits():
            self._before = {**before, **{one: sent[one] for one in ready}}
            return False
        self._ready = ready
        return True

    def end(self, *, in_flight: bool) -> None:
        """A turn ends. `in_flight`: with requests."""
        ready, self._ready = self._ready, ()
        if not in_flight or self._sent is None:
            self._enough.clear()
            return
        sent = self._sent()
        self._enough = {one: n for one, n in self._enough.items() if one in sent}
        for one in ready:
            self._enough[one] = 2 * self._enough.get(one, self._chunks)

    def stays(self, *, loaded: bool) -> bool:
        """Whether the stage is small enough to stay in beside the largest, with all smaller ones.

        False if it goes on with no chunks: then it is first. When a turn begins; asks the daemon if
        it is not known, or may have changed, for the stage was not in (`loaded`).
        """
        if self.receives and (loaded or self._stays is None):
            with suppress(SwapdError):  # the next acquire says so
                client = self._connection.client
                self._stays = client.session.welcome.session in staying(client.status())
        return bool(self._stays)

    def stays_beside(self, *, wanted: bool) -> bool:
        """Whether it stays though it is `wanted`: there is room beside it once others give way.

        Asks the daemon, once as long as it is wanted.
        """
        if not (wanted and self._stays):
            self._beside = None
            return False
        if self._beside is None:
            self._beside = False
            with suppress(SwapdError):  # the next acquire says so
                client = self._connection.client
                status = client.status()
                lends = any(part.kind == "workspace" for part in status.components)
                self._beside = not lends and client.session.welcome.session in staying(status)
        return self._beside

    def _next_waits(self) -> bool:
        if not self._after:
            return True
        with suppress(SwapdError):
            sessions = self._connection.client.status().sessions
            return any(
                one.waiting and one.label.rpartition(":")[0] in self._after for one in sessions
            )
        return False


def staying(status: StatusReply) -> set[int]:
    """The sessions that can stay in while the largest has its turn: the smallest, as many as fit.

    Pure. The largest is none of them. Each session is a stage; what of it never leaves is beside
    them all.
    """
    nbytes: dict[int, int] = defaultdict(int)
    for part in status.components:
        if part.kind != "workspace":
            nbytes[part.session] += vm.round_up(part.nbytes, status.chunk_bytes)
    stays = {one.session: one.stays_bytes for one in status.sessions}
    for session in nbytes:
        nbytes[session] -= stays.get(session, 0)
    *smaller, largest = sorted(nbytes, key=lambda one: (nbytes[one], one)) or [0]
    room = status.budget_bytes - sum(stays.values()) - nbytes[largest]
    found = set()
    for one in smaller:
        room -= nbytes[one]
        if room < 0:
            break
        found.add(one)
    return found
