"""vLLM's own CPU worker, by the same kernels as swapd's: what is compared with."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from swapd_client.vllm.cpu import keep_weights


class PlainWorker(CPUWorker):  # type: ignore[misc]
    """As it is, but its weights stay parameters: packed ones sum otherwise."""

    def load_model(self, *args: Any, **options: Any) -> None:
        keep_weights()
        super().load_model(*args, **options)
