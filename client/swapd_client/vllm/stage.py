"""One worker process of a stage: its components in swapd, and the lease that it computes under.

Lives here: connecting, loading, registering, and when the lease is taken and given back. What a
step is, and what it schedules, is said by `worker.py`. Does not import vLLM.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch.nn import Module

from swapd_client.client import Client
from swapd_client.errors import SwapdError
from swapd_client.vllm.options import Options

log = logging.getLogger("swapd_client")

#: A stage that takes no step for so long gives its lease back if it is wanted.
IDLE_S = 0.05


class Stopped(SwapdError, RuntimeError):
    """The stage has lost its weights and cannot go on; start it again."""


class Ranks(Protocol):
    """The other ranks of a stage: they take their leases one after the other, see `ranks.py`."""

    def before(self, wanted: Callable[[], bool], give_back: Callable[[], None]) -> None:
        """Wait until the rank before holds its lease; if this one's is wanted, `give_back()`."""

    def after(self) -> None:
        """This rank holds its lease: tell the next."""

    def close(self) -> None:
        """More than once is once."""


class Stage:
    """What a worker process has with swapd. Made by `connect`; `close` it.

    Its methods are called by the thread that steps the engine. A thread of its own gives the lease
    back when it is wanted and the engine has stopped stepping.
    """

    client: Client

    @classmethod
    def connect(
        cls, options: Options, name: str, *, gpu: int | None, ranks: "Ranks | None" = None
    ) -> "Stage":
        """Connect to the daemon. `name`: of the stage, in the daemon. `gpu`: its physical index.

        Raises: NotRunning, with the command to run; VersionMismatch.
        """
        raise NotImplementedError

    def loading(self, nbytes: int) -> AbstractContextManager[None]:
        """While in it, `nbytes` of device memory are this process's own; 0: nothing.

        More than the daemon can lend is as much as it can. Blocks until others have given way.
        """
        raise NotImplementedError

    def take(self, models: Mapping[str, Module]) -> int:
        """Move the weights into swapd; how many bytes were moved."""
        raise NotImplementedError

    def note(self, came: Iterable[str], went: Iterable[str], *, computes: bool = True) -> None:
        """Before a step: requests that are new, those that ended, and if it will compute."""
        raise NotImplementedError

    def begin(self, *, encoders: bool = False) -> None:
        """Before a step; the lease is held afterwards."""
        raise NotImplementedError

    def end(self) -> None:
        """After a step; the lease is kept, or given back, as `Turns` says."""
        raise NotImplementedError

    @contextmanager
    def using(self) -> Iterator[None]:
        """Around any other call that touches weights; may be nested, also in a step."""
        raise NotImplementedError
        yield

    def close(self) -> None:
        """End the session; the weights become private memory. More than once is once."""
        raise NotImplementedError
