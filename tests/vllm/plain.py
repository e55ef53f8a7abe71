"""vLLM's own CPU worker, with the same kernels as swapd's, for comparison."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from swapd_client.vllm.cpu import keep_weights


class PlainWorker(CPUWorker):  # type: ignore[misc]
    """Its weights stay parameters: packed ones would change the order of sums."""

    def load_model(self, *args: Any, **options: Any) -> None:
        keep_weights()
        super().load_model(*args, **options)
        if self.parallel_config.pipeline_parallel_size > 1 and not self.use_v2_model_runner:
            # where nothing is compiled, vLLM never makes the tensors that a later rank receives
            self.model_runner._dummy_run(2, is_profile=True)
