"""Engines of one device start one after the other, because each sizes its KV cache by free memory.

A stage holds its daemon's turn to start from before vLLM first reads the free memory until vLLM has
warmed up; other stages wait, and hold nothing meanwhile. The ranks of a stage ask in the order of
their daemons, so two stages on two GPUs never wait for each other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from swapd_client.client import Client
from swapd_client.errors import SwapdError, Timeout
from swapd_client.lease import Lease
from swapd_client.log import log
from swapd_client.vllm.ranks import daemon_at
from swapd_client.vllm.stage.connection import connect_to_start


class StartTurn:
    """Used by the thread that starts the stage."""

    def __init__(self, stage: str, folder: Path) -> None:
        self._stage = stage
        self._folder = folder
        self._client: Client | None = None
        self._lease: Lease | None = None

    def begin(self, share: Callable[[str], Sequence[str]] | None = None) -> None:
        """Wait for the turn and take it. `share`: as in `Ranks`, if there are several ranks.

        Raises: NotRunning, with the command to run; VersionMismatch, SessionEnded; RuntimeError if
        any of several ranks cannot start.
        """
        if share is None:
            return self._take()
        folder, daemon = daemon_at(self._folder)
        # padded so that strings sort as the numbers in `Ranks`
        mine = ".".join(f"{number:020}" for number in daemon) if daemon else folder
        places = share(mine)
        if len(set(places)) < len(places):
            return  # ranks that share a daemon: `load_model` refuses them
        for place in sorted(places):
            problem = self._problem() if place == mine else ""
            if problems := [said for said in share(problem) if said]:
                self.end()
                raise RuntimeError(problems[0])

    def end(self) -> None:
        """The stage has started, or will not. Idempotent."""
        client, self._client = self._client, None
        lease, self._lease = self._lease, None
        with suppress(SwapdError):  # the turn ended with the daemon
            if lease is not None:
                lease.release()
        if client is not None:
            client.close()

    def _problem(self) -> str:
        try:
            self._take()
        except SwapdError as exc:
            return str(exc)
        return ""

    def _take(self) -> None:
        self._client = client = connect_to_start(self._folder, self._stage)
        try:
            self._lease = self._acquired(client)
        except BaseException:
            self.end()
            raise

    def _acquired(self, client: Client) -> Lease:
        try:
            return client.acquire_start(timeout=0)
        except Timeout as exc:
            log.info("%s waits: %s", self._stage, exc)
        return client.acquire_start()


@contextmanager
def once_ranks_meet(module: ModuleType, then: Callable[[], None]) -> Iterator[None]:
    """In the block, call `then()` after vLLM has connected the ranks of a stage.

    That is before vLLM reads the device's free memory, and the first time that the ranks can agree
    on an order. `module`: the one in which vLLM looks up the connecting function.
    """
    connect = module.ensure_model_parallel_initialized

    def and_then(*args: object, **kwargs: object) -> None:
        connect(*args, **kwargs)
        then()

    module.ensure_model_parallel_initialized = and_then  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.ensure_model_parallel_initialized = connect  # type: ignore[attr-defined]
