"""Model Runner V2, vLLM's default on GPUs, on a CPU: its nursery and its worker.

Its kernels are written in Triton, which compiles for no CPU. Triton's interpreter runs them:
slowly, but with the same steps as a GPU.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.vllm.engines import Nursery

TRITON = Path(sys.prefix) / "triton"

#: `TESTS_VLLM_TRITON`: see `site/`.
VARIABLES = {
    "TESTS_VLLM_TRITON": str(TRITON),
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}

#: The plugin's, with the calls that vLLM's worker for GPUs makes at its start, and the CPU's not.
WORKER = "tests.vllm.warming.Worker"


class SecondRunnerNursery(Nursery):
    """Forks processes whose engines have Model Runner V2."""

    def __init__(self) -> None:
        if not (TRITON / "triton").is_dir():
            raise RuntimeError(f"{TRITON} has no triton: run `make install-triton`")
        super().__init__(**VARIABLES)

    def fork(self, fds: Sequence[int], variables: Mapping[str, str]) -> int:
        return super().fork(fds, {**variables, **VARIABLES})


def of(worker: Any) -> str:
    """The module of a worker's model runner."""
    return type(worker.model_runner).__mro__[1].__module__
