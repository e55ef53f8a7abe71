"""Turns of stages that work on one request at the same time (`async_chunk: true`).

A stage makes chunks, and the next stage consumes them. If both do not fit, the first gives way when
it has finished, or when the next one waits and has enough chunks of one request to begin with. That
number doubles each time for the request, so that the two do not change places all the time. A stage
that is small enough to stay beside the largest keeps its lease.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from swapd.shared import vm
from swapd.shared.protocol import Status
from swapd_client.errors import SwapdError
from swapd_client.vllm.stage.connection import Connection, stage_in

#: Seconds without a step after which a stage has no step to take, even if there are chunks, which
#: nothing fetches. Longer than a busy machine delays a thread.
IDLE_S = 1.0
#: Checks without a chunk, for each request in flight, after which none is to come.
LOOKS = 2


class ChunkStreaming:
    """The chunks of one stage, even if it does not stream."""

    def __init__(self, connection: Connection, after: Sequence[str], chunks: int) -> None:
        """`after`: the stages that consume its chunks; (): any waiting stage."""
        self._connection = connection
        self._after = after
        self._chunks = chunks
        #: Number of chunks sent, by request in flight. None: unknown.
        self._sent: Callable[[], Mapping[str, int]] | None = None
        self.receives = False
        #: Whether it is a rank of a pipeline: it pauses while other ranks compute, and has steps
        #: that compute nothing while all requests are in others.
        self.in_pipeline = False
        #: Checks without a chunk since the last chunk.
        self._in_vain = 0
        #: Chunks sent before this turn, or before the last check for waiting stages.
        self._before: Mapping[str, int] = {}
        #: Chunks that are enough, for requests for which a turn has ended; `chunks` for others.
        self._enough: dict[str, int] = {}
        #: Requests of which there was enough when the turn ended.
        self._ready: Sequence[str] = ()
        #: None: not checked yet.
        self._stays: bool | None = None
        #: None: not checked yet.
        self._beside: bool | None = None

    def begin_with(self, sent: Callable[[], Mapping[str, int]], *, receives: bool) -> None:
        """The stage streams: `sent` returns the number of chunks sent for each request."""
        self._sent = sent if self._chunks else None
        self.receives = receives

    def looked(self, *, found: bool) -> None:
        """Note a check for a chunk. In a thread of vllm-omni's."""
        self._in_vain = 0 if found else self._in_vain + 1

    def may_go_on(self, in_flight: int, idle_s: float) -> bool:
        """Return whether requests in flight may have more to compute, though this step does not."""
        if not in_flight or idle_s >= IDLE_S:
            return False
        return self.in_pipeline or (self.receives and self._in_vain < LOOKS * in_flight)

    def patience_s(self, in_flight: int, idle_s: float) -> float:
        """Return the seconds without a step after which the stage gives way; usually `idle_s`."""
        pauses = self._sent is not None or self.receives or self.in_pipeline
        return IDLE_S if pauses and in_flight else idle_s

    def begin(self) -> None:
        self._beside = None
        if self._sent is not None:
            self._before = self._sent()

    def enough(self) -> bool:
        """Return whether a waiting stage has enough of this stage's chunks to begin with.

        Between two steps of a turn that is wanted. Asks the daemon, once in so many chunks.
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
        """Return whether the stage is small enough to stay beside the largest.

        False if it consumes no chunks: then it is first. Asks the daemon if that is unknown, or may
        have changed because the stage was evicted (`loaded`).
        """
        if self.receives and (loaded or self._stays is None):
            with suppress(SwapdError):  # the next acquire reports it
                client = self._connection.client
                self._stays = client.session.welcome.session in staying(client.status())
        return bool(self._stays)

    def stays_beside(self, *, wanted: bool) -> bool:
        """Return whether the stage stays though `wanted`, because others will make room beside it.

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
            return any(one.waiting and stage_in(one.label) in self._after for one in sessions)
        return False


def staying(status: Status) -> set[int]:
    """Return the sessions that stay during the largest one's turn: as many small ones as fit."""
    nbytes = _in_turn(status)
    *smaller, largest = sorted(nbytes, key=lambda one: (nbytes[one], one)) or [0]
    room = status.budget_bytes - sum(one.stays_bytes for one in status.sessions) - nbytes[largest]
    found = set()
    for one in smaller:
        room -= nbytes[one]
        if room < 0:
            break
        found.add(one)
    return found


def _in_turn(status: Status) -> dict[int, int]:
    """Return the bytes that each session needs in its turn, beside those that stay anyway."""
    nbytes: dict[int, int] = defaultdict(int)
    for part in status.components:
        if part.kind != "workspace":
            nbytes[part.session] += vm.round_up(part.nbytes, status.chunk_bytes)
    streamed = {p.session for p in status.components if p.part_of and p.policy == "sequential"}
    for one in status.sessions:
        if one.session in streamed:  # a few layers at a time
            nbytes[one.session] = one.turn_bytes
        elif one.session in nbytes:
            nbytes[one.session] -= one.stays_bytes
    return nbytes
