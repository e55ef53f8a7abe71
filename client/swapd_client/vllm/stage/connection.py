"""The daemon that a stage has, or has lost: then the stage is alone, its weights its process's own.

Lives here: the client, and what becomes of the weights when it is closed. When a stage goes alone
is said by `turns.py`, and how it comes back by `rejoining.py`.
"""

import logging
import os
import warnings
from pathlib import Path
from threading import Event

import swapd_client
from swapd_client.client import Client
from swapd_client.errors import NotRunning, SessionEnded, SwapdError
from swapd_client.vllm.ranks import Ranks

log = logging.getLogger("swapd_client")


class Stopped(SwapdError, RuntimeError):
    """The stage has lost its weights and cannot go on; start it again."""


def connect(folder: Path, stage: str) -> Client:
    """A client for a stage. Raises as `swapd_client.connect`."""
    return swapd_client.connect(folder, label=f"{stage}:{os.getpid()}")


def connect_to_start(folder: Path, stage: str) -> Client:
    """A client for a stage that starts. Raises as `connect`; NotRunning says which stage it is."""
    try:
        return connect(folder, stage)
    except NotRunning as exc:
        raise NotRunning(f"stage {stage!r} cannot start: {exc}") from exc


def close(client: Client) -> None:
    """Nothing is to run here any more: weights are kept only where that costs nothing."""
    client.close(keep=not client.session.processor.memory_is_scarce)


class Connection:
    """What a stage has its weights in: a daemon, by its client, or private memory."""

    def __init__(self, stage: str, client: Client, wake: Event, ranks: Ranks | None) -> None:
        """`wake` is set when the daemon wants something, or is gone; `ranks` are woken too."""
        #: What the stage is called.
        self.stage = stage
        self._wake = wake
        self._ranks = ranks
        #: Of the daemon; closed while the stage is alone.
        self.client = client
        #: swapd is gone, and the weights are this process's own.
        self.alone = False
        #: ... or are nowhere: then no step can be made.
        self.stopped: Stopped | None = None
        self._listen(client)

    def __repr__(self) -> str:
        return f"<Connection of {self.stage} {'alone' if self.alone else self.client}>"

    @property
    def error(self) -> SwapdError | None:
        """Why there is no daemon; None while there is."""
        return self.client.session.error

    def refuse_stopped(self) -> None:
        """Raise Stopped if the weights are nowhere, or if what was computed is wrong."""
        if self.stopped is not None:
            raise self.stopped

    def go_alone(self, error: SwapdError) -> None:
        """Have the weights in private memory. Raises: Stopped if there is no memory for them."""
        self.alone = True
        self._wake.set()
        self.leave(self.client, error)
        log.error(
            "%s goes on without swapd, its weights in private memory: it gives way to nobody until "
            "swapd is back. Start it again, and this stage comes back by itself",
            self.stage,
        )

    def leave(self, client: Client, error: Exception) -> None:
        """Close a client; what it had is in private memory. Raises: Stopped."""
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
        """What was computed cannot be taken back, and no step is made any more: what to raise."""
        self.stopped = Stopped(
            f"stage {self.stage!r} has computed on memory that others may have had ({error}), and "
            "its scheduler does not hear of that. Start the stage again; with kv: auto, and a "
            "scheduler of swapd's, such a step is computed again"
        )
        return self.stopped

    def check(self, client: Client) -> None:
        """Raise unless the daemon of another client can have the weights where they are.

        NotRunning, RanksApart.
        """
        before, now = self.client.session.welcome, client.session.welcome
        if (before.uuid, before.device) != (now.uuid, now.device):
            raise NotRunning(
                f"swapd at {client.session.endpoint} serves {now.device}, and the weights are on "
                f"{before.device}: start one for that"
            )
        if self._ranks is not None:
            self._ranks.check_place()

    def come_back(self, client: Client) -> None:
        """The weights are in the daemon of this client from now on."""
        self._listen(client)
        self.client, self.alone = client, False

    def _listen(self, client: Client) -> None:
        client.session.told.when_wanted(self._wake.set)
        if self._ranks is not None:
            client.session.told.when_wanted(self._ranks.wake)
        client.session.life.when_ended(self._tell_of_end)

    def _tell_of_end(self, error: SwapdError) -> None:
        if isinstance(error, SessionEnded):
            log.error("%s has lost swapd: %s", self.stage, error)
        self._wake.set()
