"""The worker classes for vllm-omni's AR stages (thinker, talker) and generation stages (code2wav).

Named by `worker_cls` in the stage's configuration.
"""

from vllm_omni.worker.gpu_ar_worker import GPUARWorker
from vllm_omni.worker.gpu_generation_worker import GPUGenerationWorker

from swapd_client.vllm.worker import SwapdWorkerMixin


class ARWorker(SwapdWorkerMixin, GPUARWorker):  # type: ignore[misc]
    """vllm-omni's worker of an autoregressive stage, with its weights in swapd."""


class GenerationWorker(SwapdWorkerMixin, GPUGenerationWorker):  # type: ignore[misc]
    """vllm-omni's worker of a generation stage, with its weights in swapd."""
