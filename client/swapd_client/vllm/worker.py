"""What all worker classes of AR and generation stages share: where weights are used, and loaded.

vLLM calls a worker's methods one after the other, in one thread. Lives here: which of them touch
weights, what is refused, and vLLM's memory accounting. Leases are `stage.py`'s.
"""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker as VllmWorker

from swapd_client.vllm.stage import Stage


class Leased:
    """Mixed into a worker class of vLLM's, first: its weights are swapd's, lent for each call."""

    _swapd: Stage | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load under a workspace lease, then move the weights into swapd.

        Raises: UnsupportedVersion, NotRunning, Refused.
        """
        raise NotImplementedError


class Worker(Leased, VllmWorker):  # type: ignore[misc]
    """vLLM's GPU worker, with its weights in swapd."""
