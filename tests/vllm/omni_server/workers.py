"""vllm-omni's own model runners in vLLM's CPU worker, with and without swapd.

vllm-omni's worker classes refuse a CPU, so these replace them.
"""

from typing import Any

import torch
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

from swapd_client.vllm.cpu import keep_weights
from swapd_client.vllm.worker import SwapdWorkerMixin

SEED = 7


class Seeded:
    """Each step draws the same random numbers, independent of the steps before.

    Code predictors and flow matching draw from torch's own generator: answers would differ from run
    to run.
    """

    def execute_model(self, *args: Any, **options: Any) -> Any:
        torch.manual_seed(SEED)
        return super().execute_model(*args, **options)  # type: ignore[misc]


class ARRunner(Seeded, GPUARModelRunner, CPUModelRunner):  # type: ignore[misc]
    """vllm-omni's steps, on the CPU runner's device."""


class GenerationRunner(Seeded, GPUGenerationModelRunner, CPUModelRunner):  # type: ignore[misc]
    """The same for stages that generate in one step."""


class PlainARWorker(OmniWorkerMixin, cpu_worker.CPUWorker):  # type: ignore[misc]
    """Without swapd."""

    #: vllm-omni reads it to check the connectors of a stage.
    model_runner_cls: type = ARRunner

    def init_device(self) -> None:
        before = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = self.model_runner_cls
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = before

    def load_model(self, *args: Any, **options: Any) -> None:
        keep_weights()
        config = self.vllm_config.compilation_config
        config.max_cudagraph_capture_size = config.max_cudagraph_capture_size or 0  # as on a GPU
        super().load_model(*args, **options)

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """With a profile, as on a GPU: a forward tells the talker its voice."""
        self.model_runner.profile_run()
        return int(super().determine_available_memory())


class PlainGenerationWorker(PlainARWorker):
    """The same for stages that generate in one step."""

    model_runner_cls = GenerationRunner


class ARWorker(SwapdWorkerMixin, PlainARWorker):
    """As `swapd_client.vllm.omni.ARWorker`."""


class GenerationWorker(SwapdWorkerMixin, PlainGenerationWorker):
    """As `swapd_client.vllm.omni.GenerationWorker`."""
