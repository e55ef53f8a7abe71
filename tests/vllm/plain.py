"""vLLM's own CPU worker, with the same kernels as swapd's, for comparison."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from swapd_client.vllm.cpu import keep_weights


class PlainWorker(CPUWorker):  # type: ignore[misc]
    """Its weights stay parameters: packed ones would change the order of sums."""

    def load_model(self, *args: Any, **options: Any) -> None:
        keep_weights()
        super().load_model(*args, **options)
