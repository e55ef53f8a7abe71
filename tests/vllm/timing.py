"""A worker that says how long its weights took: to be read or found, and to be in swapd."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from swapd_client.vllm import worker_start
from swapd_client.vllm.cpu import CPUWorker

#: Steps of loading that have nothing to do with weights: vLLM builds the model, and the worker
#: looks for CUDA graphs.
_ASIDE = ((BaseModelLoader, "create_model"), (worker_start, "_graphs"))


class Worker(CPUWorker):
    _weights_s = 0.0

    def weights_s(self) -> float:
        """Seconds from the start of loading until the weights are in swapd, without `_ASIDE`."""
        return self._weights_s

    def _load(self, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as patched:
            for where, name in _ASIDE:
                call = self._timed(getattr(where, name), -1)
                patched.enter_context(patch.object(where, name, call))
            self._timed(super()._load, 1)(*args, **kwargs)

    def _timed(self, call: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._weights_s += sign * (time.perf_counter() - began)

        return timed
