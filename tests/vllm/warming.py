"""Workers that warm up as those for GPUs do with Model Runner V2: by requests of their own.

vLLM's worker for CPUs leaves that out. Each step goes through the worker's own methods, and so
through swapd's, in the middle of a call that has the lease already.
"""

from typing import Any
from unittest.mock import patch

from vllm import SamplingParams
from vllm.v1.worker.cpu_worker import CPUWorker as VllmCPUWorker
from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup, warmup_kernels

from swapd_client.vllm.cpu import CPUWorker
from tests.vllm import plain, second_runner

#: Tokens of the step in which one request begins and another goes on.
MIXED_TOKENS = 8


def _plainly() -> SamplingParams:
    """Plain sampling: the interpreter does not run all kernels of other kinds."""
    return SamplingParams(max_tokens=4, temperature=0)


class Warms(VllmCPUWorker):  # type: ignore[misc]
    """vLLM's, with the steps."""

    def compile_or_warm_up_model(self) -> Any:
        said = super().compile_or_warm_up_model()
        steps = (self.execute_model, self.sample_tokens)
        run_mixed_prefill_decode_warmup(self.model_runner, *steps, MIXED_TOKENS)
        with patch.object(SamplingParams, "for_sampler_warmup", _plainly):
            warmup_kernels(self.model_runner, *steps)
        return said

    def runner(self) -> str:
        return second_runner.of(self)


class PlainWorker(plain.PlainWorker, Warms):
    """Without swapd."""


class Worker(CPUWorker, Warms):
    """With swapd."""

    def turns(self) -> list[Any]:
        """The plugin's requests, and whether it is in a call."""
        stage = self._swapd
        return [len(stage.turns.keeping.in_flight), stage._gate.depth]
