"""The worker class for vLLM on a CPU, where the device is shared memory (`device = "host"`)."""

import torch
import vllm._custom_ops
from vllm.model_executor.layers import utils
from vllm.v1.worker.cpu_worker import CPUWorker as VllmCPUWorker

from swapd.shared import config
from swapd_client.vllm.worker import SwapdWorkerMixin


def keep_weights() -> None:
    """Make all models loaded from now on compute with their parameters.

    oneDNN and the AMX kernels would pack weights into memory of their own, which swapd cannot lend.
    """
    vllm._custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    # a process must ask the kernel before it uses AMX; oneDNN asks, vLLM's attention does not, and
    # would die of an illegal instruction
    torch.cpu._init_amx()


class CPUWorker(SwapdWorkerMixin, VllmCPUWorker):  # type: ignore[misc]
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if config.is_disabled():
            return super().load_model(load_dummy_weights=load_dummy_weights)
        keep_weights()
        super().load_model(load_dummy_weights=load_dummy_weights)
        if self.parallel_config.pipeline_parallel_size > 1:
            # vLLM makes what a later rank receives in its profile run, which no CPU has
            with self._swapd.using():
                self._dummy_forward()
