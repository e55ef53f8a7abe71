"""A worker that stops in a step for so long that its daemon fences its session. Then it computes
the step before it hears of that: on memory that belongs to another session by then.
"""

import os
import signal
from typing import Any

import torch

from swapd_client.vllm.cpu import CPUWorker


class Worker(CPUWorker):
    """Stops in the next step after `freeze`, and continues with SIGCONT."""

    _freezes = False

    def freeze(self, rank: int = 0) -> int | None:
        """The pid if this is that rank; None if it is another one, which does not freeze.

        It also has something shown that is idle: the daemon awaits that it is put away.
        """
        if self.rank != rank:
            return None
        client = self._swapd.client
        client.register("idle", {"it": torch.zeros(1 << 20)})
        with client.acquire("idle"):
            pass
        while any(one.leases for one in client.status().components if one.name == "idle"):
            pass  # a stopped process would not send the releases that are on their way
        self._freezes = True
        return os.getpid()

    def execute_model(self, scheduler_output: Any) -> Any:
        if not self._freezes:
            return super().execute_model(scheduler_output)
        self._freezes = False
        self._check_last_step()  # it would wait for that thread
        with self._swapd.client.session.life.lock:  # the session's own thread would need it
            os.kill(os.getpid(), signal.SIGSTOP)
            return super().execute_model(scheduler_output)
