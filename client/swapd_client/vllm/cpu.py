"""The worker class for vLLM on a CPU, where the device is shared memory (`device = "host"`)."""

import vllm._custom_ops
from vllm.v1.worker.cpu_worker import CPUWorker as VllmCPUWorker

from swapd_client.vllm.worker import Leased


class CPUWorker(Leased, VllmCPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker, with its weights in swapd."""

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        # oneDNN would pack weights into memory of its own, and leave nothing to lend
        vllm._custom_ops._supports_onednn = False
        super().load_model(load_dummy_weights=load_dummy_weights)
