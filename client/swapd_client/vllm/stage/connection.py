"""The daemon of a stage; or the stage alone, with its weights in private memory."""

import os
import time
import warnings
from pathlib import Path
from threading import Event

import swapd_client
from swapd_client.client import Client
from swapd_client.errors import DaemonGone, NotRunning, OutOfMemory, SessionEnded, SwapdError
from swapd_client.log import log
from swapd_client.rejoining import refuse_another_device
from swapd_client.vllm.ranks import Ranks, stage_of

#: Seconds for which a stage on a GPU waits for the next daemon before it goes alone: the private
#: weights of all stages may not fit there.
WAIT_S = 30.0


class Stopped(SwapdError, RuntimeError):
    """The stage has lost its weights, or may have computed wrong results; start it again."""


def connect(folder: Path, stage: str) -> Client:
    """A stage does not reconnect: without a daemon it goes alone."""
    label = f"{stage}:{os.getpid()}"
    return swapd_client.connect(folder, label=label, faults=None, reconnect=0)


def stage_in(label: str) -> str:
    """Return the stage of a session of `connect`, also of a rank, and of a stage in `swapd run`:
    the thinker of "omni/thinker.tp1:7"."""
    return stage_of(label.rpartition(":")[0].rpartition("/")[2])


def connect_to_start(folder: Path, stage: str) -> Client:
    try:
        return connect(folder, stage)
    except NotRunning as exc:
        raise NotRunning(f"stage {stage!r} cannot start: {exc}") from exc


def close(client: Client) -> None:
    """Close the client of an ending stage; it keeps its weights only where that costs nothing."""
    client.close(keep=not client.session.processor.memory_is_scarce)


class Connection:
    def __init__(self, stage: str, client: Client, ranks: Ranks | None) -> None:
        self.stage = stage
        self.ranks = ranks
        #: Closed while the stage is alone.
        self.client = client
        #: Wakes the stage's own thread: a lease is wanted, or the daemon is gone.
        self.wake = Event()
        self.closed = Event()
        self.alone = False
        self.wait_s = WAIT_S if client.session.processor.memory_is_scarce else 0.0
        self._waits_until = 0.0
        self._lost: SwapdError | None = None
        #: Whether the weights of a dead daemon wait in the client for the next one.
        self.left = False
        #: Set if no further step is possible.
        self.stopped: Stopped | None = None
        self._listen(client)

    @property
    def error(self) -> SwapdError | None:
        return self.client.session.error

    @property
    def waits(self) -> bool:
        """Whether the daemon is gone, and the next one may take the weights before the stage goes
        alone."""
        return self._may_wait() and time.monotonic() < self._waits_until

    def _may_wait(self) -> bool:
        is_over = self.alone or self.closed.is_set()
        return not is_over and isinstance(self.error, DaemonGone)

    def waits_on(self) -> bool:
        """Wait for as long again if there is no memory for the weights without a daemon; return
        whether."""
        if not (self.wait_s and self._may_wait()) or self._has_room():
            return False
        self._waits_until = time.monotonic() + self.wait_s
        log.error(
            "%s has no memory for its weights without swapd: its calls wait on. Start swapd again",
            self.stage,
        )
        return True

    def _has_room(self) -> bool:
        """Set memory aside for all weights, or for none."""
        places = [part.where for part in self.client.session.registry.all()]
        try:
            for where in places:
                where.set_memory_aside()
        except OutOfMemory:
            for where in places:
                where.give_memory_back()
            return False
        return True

    def refuse_stopped(self) -> None:
        if self.stopped is not None:
            raise self.stopped

    def go_alone(self, error: SwapdError) -> None:
        """Move the weights to private memory. Raises: Stopped if there is no room for them."""
        self.alone, self.left = True, False
        self.wake.set()
        self.leave(self.client, error)
        log.error(
            "%s goes on without swapd, its weights in private memory: it does not give way until "
            "swapd is back. Start it again, and this stage comes back by itself",
            self.stage,
        )

    def leave(self, client: Client, error: Exception) -> None:
        """Close a client, which moves its weights to private memory. Raises: Stopped."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                client.close()
        except RuntimeWarning as exc:
            self.stopped = Stopped(
                f"stage {self.stage!r} has lost swapd ({error}), and there is no memory for its "
                "weights without it. Start swapd again, then the stage"
            )
            raise self.stopped from exc

    def stop(self, error: SwapdError) -> Stopped:
        """Refuse all further steps: wrong results cannot be undone. Returns the error to raise."""
        self.stopped = Stopped(
            f"stage {self.stage!r} has computed on memory that others may have used ({error}), and "
            "its scheduler cannot learn of that. Start the stage again; with kv: auto, and a "
            "scheduler of swapd's, such a step is computed again (of several ranks, that of the "
            "one whose output vLLM takes)"
        )
        return self.stopped

    def check(self, client: Client) -> None:
        """Raise InvalidSource or RanksApart unless the daemon of `client` can take the weights."""
        refuse_another_device(self.client.session, client.session)
        if self.ranks is not None:
            self.ranks.check_place()

    def come_back(self, client: Client) -> None:
        self._listen(client)
        before, was_left = self.client, self.left
        self.client, self.alone, self.left = client, False, False
        if was_left:
            before.session.handed_over()
            before.close()

    def _listen(self, client: Client) -> None:
        client.session.told.when_wanted(self.wake.set)
        if self.ranks is not None:
            client.session.told.when_wanted(self.ranks.wake)
        client.session.life.when_ended(self._tell_of_end)

    def _tell_of_end(self, error: SwapdError) -> None:
        if error is self._lost:
            return
        self._lost, self._waits_until = error, time.monotonic() + self.wait_s
        if isinstance(error, SessionEnded):
            waits = f"; its calls wait {self.wait_s:g} s for the next daemon" if self.waits else ""
            log.error("%s has lost swapd: %s%s", self.stage, error, waits)
        self.wake.set()
