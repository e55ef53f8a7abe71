"""The daemon of a stage; or the stage alone, with its weights in private memory."""

import os
import warnings
from pathlib import Path
from threading import Event

import swapd_client
from swapd_client.client import Client
from swapd_client.errors import NotRunning, SessionEnded, SwapdError
from swapd_client.log import log
from swapd_client.rejoining import refuse_another_device
from swapd_client.vllm.ranks import Ranks


class Stopped(SwapdError, RuntimeError):
    """The stage has lost its weights, or may have computed wrong results; start it again."""


def connect(folder: Path, stage: str) -> Client:
    """A stage does not reconnect: without a daemon it goes alone."""
    label = f"{stage}:{os.getpid()}"
    return swapd_client.connect(folder, label=label, faults=None, reconnect=0)


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
        #: Set if no further step is possible.
        self.stopped: Stopped | None = None
        self._listen(client)

    @property
    def error(self) -> SwapdError | None:
        return self.client.session.error

    def refuse_stopped(self) -> None:
        if self.stopped is not None:
            raise self.stopped

    def go_alone(self, error: SwapdError) -> None:
        """Move the weights to private memory. Raises: Stopped if there is no room for them."""
        self.alone = True
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
        self.client, self.alone = client, False

    def _listen(self, client: Client) -> None:
        client.session.told.when_wanted(self.wake.set)
        if self.ranks is not None:
            client.session.told.when_wanted(self.ranks.wake)
        client.session.life.when_ended(self._tell_of_end)

    def _tell_of_end(self, error: SwapdError) -> None:
        if isinstance(error, SessionEnded):
            log.error("%s has lost swapd: %s", self.stage, error)
        self.wake.set()
