"""A worker one of whose ranks can get no memory for its next step."""

from typing import Any

from swapd_client.vllm.cpu import CPUWorker
from swapd_client.vllm.stage.connection import Stopped


class Worker(CPUWorker):
    """With swapd."""

    def fail(self, rank: int) -> None:
        """Have that rank fail in its next step."""
        if self.rank == rank:
            self._swapd.begin = _fail  # type: ignore[method-assign]


def _fail(**_: Any) -> None:
    raise Stopped("there is no memory")
