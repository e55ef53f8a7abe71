"""One worker process of a stage, as its worker class uses it.

`Stage` has the calls, sleep, and a thread of its own. The other files have its parts: `turns.py`
leases, `memory.py` moves weights and cache, `connection.py` has the daemon, `gate.py` the calls.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.nn import Module

import swapd_client
from swapd_client.client import Client
from swapd_client.errors import Conflict, SwapdError
from swapd_client.log import log
from swapd_client.vllm import gpus
from swapd_client.vllm.eager import eager
from swapd_client.vllm.neighbours import ALONE, Neighbours
from swapd_client.vllm.options import Options
from swapd_client.vllm.ranks import Ranks, stage_of
from swapd_client.vllm.refusals import Unsupported
from swapd_client.vllm.stage import segments
from swapd_client.vllm.stage.components import StageComponents, sizes_of
from swapd_client.vllm.stage.connection import Connection, close, connect_to_start
from swapd_client.vllm.stage.memory import StageMemory
from swapd_client.vllm.stage.rejoining import Rejoining
from swapd_client.vllm.stage.turns import AwaitsDaemon, Turns

#: The tags of vLLM's sleep mode.
EVERYTHING = ("weights", "kv_cache")


class Stage:
    """The swapd state of one worker process. Made by `connect`; call `close` at the end.

    The thread that steps the engine calls its methods.
    """

    def __init__(
        self,
        client: Client,
        options: Options,
        name: str,
        ranks: Ranks | None = None,
        neighbours: Neighbours = ALONE,
    ) -> None:
        self.name = name
        self.options = options
        self.components = StageComponents()
        self.connection = Connection(name, client, ranks)
        self.turns = Turns(self.connection, self.components, options, neighbours)
        self.memory = StageMemory(options, self.turns)
        within_s = options.finish_within_s if options.slice_s is None else options.slice_s
        self._rejoining = Rejoining(self.turns, within_s)
        self._gate = self.turns.gate
        #: Every step calls these, and a method that only passes on costs 2 us.
        self.arrive = self.turns.segments.arrive
        self.fence = self.turns.fence
        self._asleep: set[str] = set()
        self._thread = threading.Thread(target=self._attend, name="swapd-stage", daemon=True)
        self._thread.start()

    @property
    def client(self) -> Client:
        return self.connection.client

    @property
    def alone(self) -> bool:
        return self.connection.alone

    @classmethod
    def connect(
        cls,
        options: Options,
        name: str,
        *,
        gpu: int | None,
        rank: int = 0,
        share: Callable[[str], Sequence[str]] | None = None,
        neighbours: Neighbours = ALONE,
    ) -> "Stage":
        """Connect to the daemon.

        `name`: the stage's in the daemon; of a rank, "thinker.tp1". `gpu`: the GPU's number in this
        process, None on a CPU. `rank` and `share`: as in `Ranks`, if the stage has several ranks.

        Raises: NotRunning, with the command to run; NoEndpoint, RanksApart, VersionMismatch;
        DeviceFailed.
        """
        folder = gpus.folder_of(options.endpoint, gpu, rank)
        ranks = share and Ranks(rank, folder, share, stage=stage_of(name))
        if options.faults == "explain":
            swapd_client.explain_faults()
        try:
            client = connect_to_start(folder, name)
            gpus.check(client.session, gpu, name)
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise
        return cls(client, options, name, ranks, neighbours)

    def close(self) -> None:
        """End the session; the weights become private memory. Idempotent.

        Not on a GPU, which may have no room for them: do not use the weights afterwards there.
        """
        connection = self.connection
        if connection.closed.is_set():
            return
        connection.closed.set()
        connection.wake.set()
        self._rejoining.give_up()
        self._thread.join()
        self.turns.end()
        self.turns.window.close()
        if connection.ranks is not None:
            connection.ranks.close()
        close(connection.client)

    # --- sleep -----------------------------------------------------------------------------

    def sleep(self, what: Iterable[str] = EVERYTHING) -> None:
        """Give the lease back, evict `what`, and discard the KV cache's contents. Between steps.

        A call that needs weights takes a lease of its own.
        """
        with self._gate.lock:
            self._gate.await_open()
            self._asleep.update(what)
            self.turns.sleep()
        if self.alone:
            return log.warning("%s sleeps without swapd: it keeps its memory", self.name)
        names: Iterable[str] = [f"{self.name}.kv"]
        if "weights" in self._asleep:
            names = sizes_of(self.client.session)
        stay = [name for name in names if self._stays(name)]
        said = f"; on the device stays {', '.join(stay)}" if stay else ""
        log.info("%s sleeps: others may have its memory%s", self.name, said)

    def _stays(self, name: str) -> bool:
        try:
            self.client.evict(name)
        except SwapdError as exc:  # any other: it leaves when its room is needed
            return isinstance(exc, Conflict)
        return False

    def wake_up(self, what: Iterable[str] | None = None) -> None:
        """End the sleep of `what`, by default all. When nothing sleeps any more, take a turn.

        Blocks until all is loaded. Raises as `begin`.
        """
        if not self._asleep:
            return
        self._asleep.difference_update(EVERYTHING if what is None else what)
        if self._asleep:
            return
        with self._gate.lock:
            self.turns.keeping.wake()
        if self.components.main:  # else each component is loaded for its own calls
            self.begin()
            self.end()
        log.info("%s is awake", self.name)

    # --- calls -----------------------------------------------------------------------------

    def note(self, came: Iterable[str], went: Iterable[str]) -> None:
        """Note the requests that are new in the next step, and those that ended."""
        came, went = tuple(came), tuple(went)
        if (cache := self.components.cache) is not None:
            cache.in_use.ended(went)
        self.turns.keeping.note(came, went)
        if came and self.turns.held:
            self.turns.load_next()  # otherwise the turn's begin does

    def begin(self, *, encoders: bool = False) -> None:
        """Hold the lease for a step, as `Turns.hold`. `encoders`: whether it has encoder inputs."""
        try:
            if not self._gate.steps:
                self._gate.enter(step=True)
            self._hold(encoders=encoders)
        except BaseException:
            self.end()
            raise

    def _hold(self, *, encoders: bool) -> None:
        while True:
            try:
                return self.turns.hold(encoders=encoders)
            except AwaitsDaemon:
                self._gate.step_aside()

    @property
    def begun(self) -> bool:
        return self._gate.steps and self.turns.held

    def end(self) -> None:
        if self._gate.steps:
            self._leave(step=True)

    def rest(self) -> None:
        with self._gate.lock:
            self._gate.tell()  # requests may have ended
            if not self._gate.depth:
                self.turns.rest()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context of a call that takes leases of its own: the stage rejoins before it, or after."""
        self._gate.enter()
        try:
            self.connection.refuse_stopped()
            yield
        finally:
            self._leave()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Context of any other call that uses weights; may be nested, also in a step.

        Raises: SessionFenced if its results may be wrong, as `fence` reports.
        """
        self._gate.enter()
        try:
            self._hold(encoders=True)
            self.turns.segments.arrive()
            yield
            if (fenced := self.turns.fence()()) is not None:
                raise fenced
        finally:
            self._leave()

    @contextmanager
    def reading_all(self) -> Iterator[None]:
        """As `using`, for a call that reads all weights in any order.

        Raises also: Unsupported if layers stream, because then some are never on the device
        together.
        """
        if self.turns.window.first:
            raise Unsupported(
                f"stage {self.name!r} streams its layers, so this call cannot read all weights: "
                f"leave out {self.options.streams[0]} on an instance that is to do this"
            )
        with self.using():
            yield

    def find_segments(self, models: Mapping[str, Module], forward: Callable[[], None]) -> None:
        """Let steps begin before all layers have arrived, if each is used in its own forward only.

        `forward()` computes with all of them, so that this can check it. Raises as `forward`.
        """
        if self.connection.ranks is not None or not (layers := self.components.layers(models)):
            return
        with self.using(), eager(models.values()):
            found = segments.found_in(layers, forward)
        with self._gate.lock:
            self.turns.segments.use(found)
        log.info(
            "%s begins its turns with the first of its layers: %d of %d parts may come later",
            self.name,
            len(found),
            len(layers),
        )

    def _leave(self, *, step: bool = False) -> None:
        try:
            if self._gate.depth == 1:
                self.turns.settle()
        finally:
            self._gate.leave(step=step)

    # --- in the stage's own thread ---------------------------------------------------------

    def _attend(self) -> None:
        """Release a wanted lease once nothing uses it; without a daemon, look for the next."""
        wake, closed = self.connection.wake, self.connection.closed
        while not closed.is_set():
            every_s = self._rejoining.looks_every_s()
            wake.wait(every_s)
            wake.clear()
            if every_s is not None:
                self._rejoining.look()
            while self.turns.is_wanted() and not closed.is_set():
                with self._gate.lock:
                    again_s = self.turns.end_if_idle()
                closed.wait(again_s)
