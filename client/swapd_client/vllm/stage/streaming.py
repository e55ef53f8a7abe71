"""Stages that work on one request at the same time (`async_chunk: true`), by chunks.

A stage makes chunks, and the next stage consumes them. If both do not fit, they take turns: the
first gives way when the next one waits and has enough chunks of one request to begin with, or when
it has finished. So the next one starts early. A request then needs twice as many chunks each time,
so they do not change places all the time. A stage that is small enough to stay beside the largest
keeps its lease, so that the daemon evicts only stages that are done. `scheduler.py` counts the
chunks that vllm-omni has sent.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from swapd.shared import vm
from swapd.shared.protocol import Status
from swapd_client.errors import SwapdError
from swapd_client.vllm.stage.connection import Connection

log = logging.getLogger("swapd_client")

#: A stage that takes no step for so long has none to take, even if there are chunks: nothing
#: fetches them. Seconds; longer than a busy machine delays a thread.
IDLE_S = 1.0
#: Checks for a chunk in vain, for each request, after which there is none.
LOOKS = 2


class ChunkStreaming:
    """State of one stage, or of one of its ranks, even if it does not stream."""

    def __init__(self, connection: Connection, after: Sequence[str], chunks: int) -> None:
        """`after`: the stages that consume its chunks; (): any waiting stage. `chunks`: as in
        `Options`.
        """
        self._connection = connection
        self._after = after
        self._chunks = chunks
        #: Number of chunks sent, by request in flight. None: unknown.
        self._sent: Callable[[], Mapping[str, int]] | None = None
        self.receives = False
        #: Whether it is a rank of a pipeline. It pauses while others compute, and has steps that
        #: compute nothing while all requests are in others.
        self.in_pipeline = False
        #: Checks for a chunk in vain since the last one.
        self._in_vain = 0
        #: Chunks sent before this turn, or before the last check for waiting stages.
        self._before: Mapping[str, int] = {}
        #: Chunks that are enough of a request for which turns have ended; `chunks` of others.
        self._enough: dict[str, int] = {}
        #: Requests of which there was enough when the turn ended.
        self._ready: Sequence[str] = ()
        #: Whether it is small enough to stay; None: not checked yet.
        self._stays: bool | None = None
        #: Whether waiting stages now have room beside it; None: not checked yet.
        self._beside: bool | None = None

    def begin_with(self, sent: Callable[[], Mapping[str, int]], *, receives: bool) -> None:
        """The stage streams: `sent` returns the number of chunks sent for each request."""
        self._sent = sent if self._chunks else None
        self.receives = receives

    def looked(self, *, found: bool) -> None:
        """Note a check for a chunk. In a thread of vllm-omni's."""
        self._in_vain = 0 if found else self._in_vain + 1

    def may_go_on(self, in_flight: int, idle_s: float) -> bool:
        """Whether there may be more to compute for the requests in flight, though no step does.

        `idle_s`: time since the last step that did.
        """
        if not in_flight or idle_s >= IDLE_S:
            return False
        return self.in_pipeline or (self.receives and self._in_vain < LOOKS * in_flight)

    def patience_s(self, in_flight: int, idle_s: float) -> float:
        """Seconds that a stage with requests in flight may take no step before it gives way."""
        pauses = self._sent is not None or self.receives or self.in_pipeline
        return IDLE_S if pauses and in_flight else idle_s

    def begin(self) -> None:
        self._beside = None
        if self._sent is not None:
            self._before = self._sent()

    def enough(self) -> bool:
        """Whether a waiting stage consumes the chunks, and has enough of a request to begin with.

        Between two steps of a turn that is wanted. Asks the daemon for waiting stages, once in so
        many chunks.
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
        ready, self._ready = self._ready, ()
        if not in_flight or self._sent is None:
            self._enough.clear()
            return
        sent = self._sent()
        self._enough = {one: n for one, n in self._enough.items() if one in sent}
        for one in ready:
            self._enough[one] = 2 * self._enough.get(one, self._chunks)

    def stays(self, *, loaded: bool) -> bool:
        """Whether the stage is small enough to stay beside the largest, with all smaller ones.

        False if it consumes no chunks: then it is first. When a turn begins. Asks the daemon if
        that is unknown, or may have changed because the stage was evicted (`loaded`).
        """
        if self.receives and (loaded or self._stays is None):
            with suppress(SwapdError):  # the next acquire reports it
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
            with suppress(SwapdError):  # the next acquire reports it
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


def staying(status: Status) -> set[int]:
    """Sessions that can stay during the largest one's turn: the smallest, as many as fit.

    Pure. The largest is none of them. Each session is a stage; its components that always stay have
    room beside them all.
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
