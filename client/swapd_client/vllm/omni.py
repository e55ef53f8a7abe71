"""The worker classes for vllm-omni's stages, named by `worker_cls` in the stage's configuration."""

from vllm_omni.worker.gpu_ar_worker import GPUARWorker
from vllm_omni.worker.gpu_generation_worker import GPUGenerationWorker

from swapd_client.vllm.worker import SwapdWorkerMixin


class ARWorker(SwapdWorkerMixin, GPUARWorker):  # type: ignore[misc]
    """For autoregressive stages (thinker, talker)."""

    _of_type = "ar"


class GenerationWorker(SwapdWorkerMixin, GPUGenerationWorker):  # type: ignore[misc]
    """For generation stages (code2wav)."""

    _of_type = "generation"
