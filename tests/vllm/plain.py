"""vLLM's own CPU worker, by the same kernels as swapd's: what is compared with."""

from typing import Any

from vllm import _custom_ops
from vllm.v1.worker.cpu_worker import CPUWorker


class PlainWorker(CPUWorker):  # type: ignore[misc]
    """As it is, but its weights stay parameters: oneDNN would pack them, and sum otherwise."""

    def load_model(self, *args: Any, **options: Any) -> None:
        _custom_ops._supports_onednn = False
        super().load_model(*args, **options)
