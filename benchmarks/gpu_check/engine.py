"""The process of one vLLM engine: `python -m benchmarks.gpu_check.engine SETTINGS ENDPOINT LABEL`.

The label is the stage's name, and the name of its model's folder. The engine's core is in this
process. Its commands are the methods of `Engine`.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.commands import Commands
from benchmarks.gpu_check.settings import MIB, Settings

#: Tokens of a request, and of its answer.
TOKENS = 32
SMALL_TOKENS = 6
CACHE_BYTES = 256 * MIB
SMALL_CACHE_BYTES = 16 * MIB


class Engine(Commands):
    """One `vllm.LLM`, plain or on swapd."""

    def __init__(self, settings: Settings, endpoint: Path, label: str) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._name = label
        self._tokens = SMALL_TOKENS if settings.on_cpu else TOKENS

    def start(self, model: str, plugin: bool, **more: Any) -> int:
        """Make the engine, ready to serve; return the bytes of its weights."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # noqa: TID251 - vLLM reads it
        from vllm import LLM

        worker, cache = "swapd_client.vllm.worker.Worker", CACHE_BYTES
        if self._settings.on_cpu:
            from swapd_client.vllm import cpu

            cpu.keep_weights()  # otherwise oneDNN has copies, and other sums
            worker, cache = "swapd_client.vllm.cpu.CPUWorker", SMALL_CACHE_BYTES
        if plugin:
            swapd = {"component": self._name, "endpoint": str(self._endpoint)}
            more |= {"worker_cls": worker, "additional_config": {"swapd": swapd}}
        options: dict[str, Any] = {
            "model": model,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 256,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": cache,
            "gpu_memory_utilization": 0.02,  # others have the rest; the cache's size is set
            "disable_log_stats": True,
            **more,
        }
        self._llm = LLM(**options)
        worker_of = self._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        self._worker = getattr(worker_of, "worker", worker_of)
        return sum(weight.nbytes for weight in self._model().parameters())

    def about(self) -> dict[str, Any]:
        """vLLM's model runner, and the methods and kernels of its layers."""
        runners = [kind.__module__ for kind in type(self._worker.model_runner).__mro__]
        modules = list(self._model().modules())
        methods = [getattr(module, "quant_method", None) for module in modules]
        backends = {getattr(getattr(m, "unquantized_backend", None), "name", "") for m in methods}
        kernels = [getattr(m, "fp8_linear", None) for m in methods]
        names = {type(one).__name__ for one in (*methods, *kernels) if one is not None}
        return {
            "second": "vllm.v1.worker.gpu.model_runner" in runners,
            "runner": runners[0],
            "experts": ", ".join(sorted(backends - {""})),
            "methods": sorted(names | backends - {""}),
            "layers": sorted({type(module).__name__ for module in modules}),
        }

    def turn(self, tokens: list[int]) -> dict[str, Any]:
        """The model's output for the tokens, and the device's free memory."""
        from vllm import SamplingParams

        first_s = 0.0
        settings = SamplingParams(
            max_tokens=self._tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        engine, out = self._llm.llm_engine, []
        engine.add_request(str(time.monotonic_ns()), {"prompt_token_ids": tokens}, settings)
        while engine.has_unfinished_requests():
            for said in engine.step():
                out = list(said.outputs[0].token_ids)
                first_s = first_s or time.monotonic()
        free = 0 if self._settings.on_cpu else torch.cuda.mem_get_info(self._settings.index)[0]
        return {"tokens": out, "sound": "", "first_s": first_s, "free": free, "came": False}

    def asleep(self) -> None:
        """Free its device memory, as vLLM's level 1 does."""
        self._llm.sleep(level=1)

    def awake(self) -> None:
        self._llm.wake_up()

    def _model(self) -> Any:
        return self._worker.model_runner.get_model()


if __name__ == "__main__":
    Engine(Settings.decode(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]).serve()
