"""A stage's turns: when it takes its lease, and when it gives way.

A turn begins in `_begin`, and ends in `end` or, with the daemon, in `go_alone`. In between the
lease is kept from step to step without a message, as `StageKeeping` decides. All components of a
step are acquired at once, so that no stage holds a part and waits for the rest.

During a call the lease belongs to the call's thread; otherwise to the holder of the gate's lock.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from swapd.shared.text import counted
from swapd.shared.units import seconds
from swapd_client.errors import ClientClosed, SessionEnded, SessionFenced, SwapdError, Timeout
from swapd_client.lease import Lease
from swapd_client.log import log
from swapd_client.tracing import in_traces_of
from swapd_client.vllm.neighbours import Neighbours
from swapd_client.vllm.options import Options
from swapd_client.vllm.ranks import stage_of
from swapd_client.vllm.stage.components import StageComponents
from swapd_client.vllm.stage.connection import Connection
from swapd_client.vllm.stage.gate import CallGate
from swapd_client.vllm.stage.keeping import StageKeeping
from swapd_client.vllm.stage.segments import Segments
from swapd_client.vllm.stage.streaming import ChunkStreaming
from swapd_client.vllm.stage.window import Window

#: Seconds without a step after which a stage gives back a wanted lease.
IDLE_S = 0.05


class AwaitsDaemon(Exception):
    """The daemon is gone, and the call begins anew when the stage has the next one, or is alone."""


class Turns:
    def __init__(
        self,
        connection: Connection,
        components: StageComponents,
        options: Options,
        neighbours: Neighbours,
    ) -> None:
        self.connection = connection
        self.components = components
        self.gate = CallGate()
        self.keeping = StageKeeping(options.finish_within_s, options.slice_s)
        self.streaming = ChunkStreaming(connection, neighbours.after, options.chunks_per_turn)
        self.segments = Segments(self.go_alone)
        self.window = Window(self.go_alone)
        self._after, self._before = (
            _components_of(names, connection.stage) for names in neighbours
        )
        self._ranks = connection.ranks
        #: The `traceparent` headers of the stage's requests, the oldest first.
        self.headers: Callable[[], Sequence[Mapping[str, str]]] = tuple
        self._lease: Lease | None = None
        #: Why a running call has lost its lease, if others may have used the memory.
        self._fenced: SessionFenced | None = None
        #: The leased components: `StageComponents.main` or `all`.
        self._held: tuple[str, ...] = ()
        self._since = time.monotonic()

    @property
    def held(self) -> bool:
        return self._lease is not None

    def is_wanted(self) -> bool:
        """Return whether an acquire waits for leased components and may have them. Any thread."""
        lease = self._lease
        return lease is not None and (lease.wanted or self.window.is_wanted())

    # --- where a turn begins and ends ----------------------------------------------------

    def _begin(self, names: tuple[str, ...]) -> None:
        if self._ranks is not None:
            self._ranks.waits()
        coming, client, early = 0, self.connection.client, bool(self.segments)
        try:
            with in_traces_of(self.headers):
                whole = client.acquire(*names, *self.window.first, early=early)
            self._lease = self.window.begin(client, names, whole, early=early)
            self._held = names
            coming = self.segments.begin(self._lease, client.session)
        except (SessionEnded, ClientClosed) as exc:
            self._lose(exc)
            return
        self.keeping.begin(time.monotonic(), loaded=whole.loaded)
        if (cache := self.components.cache) is not None:
            cache.come(self._lease)
        if whole.loaded:
            self._since = time.monotonic()
            named, after = " + ".join(names), seconds(whole.waited_s)
            if coming:
                log.info("%s begins, after %s; %d parts are still to come", named, after, coming)
            else:
                log.info("%s is loaded, after %s", named, after)
        self.keeping.stays = self.streaming.stays(loaded=whole.loaded)
        self.streaming.begin()
        if self.keeping.in_flight:
            self.load_next()

    def load_next(self) -> None:
        """Have the daemon load the next stage, to which the requests go, while this one computes.

        A hint, to give under this stage's own lease. The daemon uses free memory, and that of
        stages that are done with these requests. Blocks only as `Leasing.hint`.
        """
        if self._after and not self.connection.alone:
            with suppress(SwapdError):  # the next acquire reports it
                self.connection.client.leasing.hint(*self._after, over=self._before)

    def end(self) -> None:
        """Release the lease, if there is one. In a call, or under the lock.

        The lease ends after the GPU work under it. Blocks only if layers stream, as `Window.end`.
        """
        if (lease := self._lease) is None:
            return
        try:
            self._prepare_end(lease)
        finally:
            self._lease = None
            with suppress(SessionEnded):  # the next acquire reports it
                lease.release()

    def _prepare_end(self, lease: Lease) -> None:
        self.segments.drop()
        self.window.end()
        if lease.wanted:
            now = time.monotonic()
            requests, spent = counted(self.keeping.over(), "request"), seconds(now - self._since)
            if inside := len(self.keeping.in_flight):
                requests += f", inside {counted(inside, 'request')}"
            log.info("%s gives way after %s, %s", self.connection.stage, requests, spent)
        self.streaming.end(in_flight=bool(self.keeping.in_flight))
        if (cache := self.components.cache) is not None:
            cache.leave()

    def renew_window(self) -> None:
        """Stream no layers any more; those of another model may."""
        self.window.close()
        self.window = Window(self.go_alone)

    def sleep(self) -> None:
        """End the turn and discard the KV cache's contents; under the lock."""
        self.keeping.sleep()
        if (cache := self.components.cache) is not None:
            cache.discard()
            if self._lease is None:  # a lease tells the daemon that there is nothing to save
                with suppress(SwapdError):  # it is off the device, or the daemon is gone
                    self._lease = self.connection.client.acquire(cache.name, timeout=0)
        self.end()

    def waits(self) -> bool:
        """Return whether the stage waits for the next daemon: not with requests whose cache nobody
        saves, nor in a change of the weights, which may contain calls."""
        if self.gate.changes or (self.keeping.whole and self.keeping.in_flight):
            return False
        return self.connection.waits and self.components.register_again is not None

    def leave(self) -> None:
        """End the turn, which is lost with the daemon; the weights wait for the next daemon.

        In no call, under the lock. Idempotent.
        """
        if self.connection.left or self.connection.alone:
            return
        held, client = self._drop_turn(), self.connection.client
        client.leasing.giving_back.keep_no_more()
        client.session.leases.drain()
        client.session.leave()
        self.connection.left = True
        if (cache := self.components.cache) is not None and not held:
            cache.go_alone()

    def _drop_turn(self) -> bool:
        """Return whether there was one."""
        held, self._lease = self.held, None
        self.segments.drop()
        self.window.end()
        return held

    def _is_held_off(self) -> bool:
        """Return whether a call, which has not computed yet, waits outside for the next daemon."""
        # once they are left, the stage's own thread says how long they wait
        waits = self.connection.left and not self.connection.closed.is_set()
        return self.gate.depth == 1 and (waits or self.waits())

    def _lose(self, error: SwapdError) -> None:
        if self._ranks is None and self._is_held_off():
            raise AwaitsDaemon from error
        self.go_alone(error)  # at once in a rank's turn: its end would fail those of later ranks

    def go_alone(self, error: SwapdError) -> None:
        """End the turn, which is lost with the daemon.

        In a call, or under the lock. Idempotent. Raises: Stopped.
        """
        if not self.connection.alone:
            if self.held and self.gate.depth > 1 and isinstance(error, SessionFenced):
                self._fenced = error
            was_told = self._drop_turn() or self.connection.left
            self.connection.go_alone(error)
            if (cache := self.components.cache) is not None and not was_told:
                cache.go_alone()

    # --- in a call -----------------------------------------------------------------------

    def hold(self, *, encoders: bool) -> None:
        """Take the lease for a new call. Blocks for the ranks before, and until it is granted.

        Nothing is held if the stage is alone. Raises as `Client.acquire`, RankGone, Stopped.
        """
        names = self.components.all if encoders else self.components.main
        if self.gate.depth > 1:  # no rank lets go in the middle of a step
            return self._take(names)
        self._fenced = None
        if self.connection.error is not None and self._is_held_off():
            raise AwaitsDaemon
        with self.in_order():
            self._take(names)

    @contextmanager
    def in_order(self, *, waits: bool = False) -> Iterator[None]:
        """Wait for the ranks before. `waits`: the block waits for memory besides the turn's."""
        if self._ranks is None:
            yield
            return
        with self._ranks.acquiring(self.is_wanted, self.end):
            if waits:
                self._ranks.waits()
            yield

    def fence(self) -> Callable[[], SessionFenced | None]:
        """In a call, return a function that tells why the results may be wrong, or None.

        A daemon may end a session that does not answer, and give its memory to others. The function
        may be called later, in any thread. Once the session has ended, it blocks until this process
        knows that.
        """
        if self._lease is not None:
            return self.connection.client.session.fenced
        fenced = self._fenced
        return lambda: fenced

    def settle(self) -> None:
        """At the end of an outermost call, keep the lease or give it back."""
        if self._lease is None:
            return
        if self.segments.broken or self.window.error is not None:
            self.end()
            return
        session = self.connection.client.session
        self._lease.rests()
        if self._held is not self.components.main and not self._exchange(self.components.main):
            self.end()  # otherwise the encoders could not be evicted
        wanted = bool(session.told.wanted) and self.is_wanted()
        if not self._keeps(wanted=wanted, enough=wanted and self.streaming.enough()):
            self.end()
        elif wanted:  # have the stage's thread notice if no step follows
            self.connection.wake.set()

    def _take(self, names: tuple[str, ...]) -> None:
        session = self.connection.client.session
        if session.error is not None:
            self.connection.refuse_stopped()
            self._lose(session.error)
            return
        asked = session.told.wanted and self.gate.depth == 1 and self.is_wanted()
        if asked and not self._keeps(wanted=True, enough=self.streaming.enough()):
            self.end()
        full = self.components.all
        if self._lease is not None and names is full and self._held is not full:
            if self._exchange(names):
                return
            self.end()
        if self._lease is None:
            self._begin(names)

    def _exchange(self, names: tuple[str, ...]) -> bool:
        held = self._lease
        try:
            self._lease = self.connection.client.acquire(*names, timeout=0)
        except (Timeout, SessionEnded):
            return False
        self._held = names
        if held is not None:
            held.release()
        return True

    def _keeps(self, *, wanted: bool, computed: bool = True, enough: bool = False) -> bool:
        beside = self.streaming.stays_beside(wanted=wanted)
        return self.keeping.keeps(
            time.monotonic(), wanted=wanted, computed=computed, enough=enough, beside=beside
        )

    # --- in no call: under the lock ------------------------------------------------------

    def rest(self) -> None:
        if (lease := self._lease) is None:
            return
        computed = self.streaming.may_go_on(len(self.keeping.in_flight), self.gate.idle_s())
        if not self._keeps(wanted=lease.wanted, computed=computed):
            self.end()

    def end_if_idle(self) -> float:
        """End the turn if nothing has used the lease for a while, else return seconds to wait."""
        if self.gate.depth or (self.keeping.whole and self.keeping.in_flight):
            return IDLE_S
        if self._lease is not None and self.streaming.stays_beside(wanted=True):
            if self._keeps(wanted=True):
                return IDLE_S
            self.end()
            return 0.0
        patience_s = self.streaming.patience_s(len(self.keeping.in_flight), IDLE_S)
        left = patience_s - self.gate.idle_s()
        if left <= 0:
            self.end()
        return max(left, 0.0)


def _components_of(stages: Iterable[str], mine: str) -> tuple[str, ...]:
    ranks = sorted({"", mine.removeprefix(stage_of(mine))})
    return tuple(f"{name}{of}{what}" for name in stages for of in ranks for what in ("", ".kv"))
