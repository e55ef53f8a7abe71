"""The environment of all processes of these tests: vLLM on the CPU, quiet, offline."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Both source roots, and a folder that Python and vLLM search: `sitecustomize`, entry points.
PYTHONPATH = os.pathsep.join(map(str, (ROOT, ROOT / "client", Path(__file__).with_name("site"))))

VLLM = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines share the cores
    "OMP_NUM_THREADS": "1",  # the same sums in the same order, in every engine
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
}

#: The instruction set to which tests limit the CPU: `make test-vllm ISA=avx2`.
ISA = "TESTS_VLLM_ISA"

#: Variables that limit torch and oneDNN, by instruction set; `site/` limits vLLM.
ISAS: dict[str, dict[str, str]] = {
    "": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}

#: A cache of Python, vLLM and torch for later processes. It is deleted with the virtual
#: environment.
CACHE = Path(sys.prefix) / "cache"


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with paths to the packages, without settings of swapd or vLLM."""
    inherited = {
        name: value
        for name, value in os.environ.items()  # noqa: TID251
        if not name.startswith(("SWAPD_", "VLLM_")) and name != "PYTHONDONTWRITEBYTECODE"
    }
    caches = {
        "PYTHONPYCACHEPREFIX": str(CACHE / "python"),  # pip was told not to compile
        "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "torch"),
    }
    made = {**inherited, **VLLM, **caches, "PYTHONPATH": PYTHONPATH, **more}
    isa = made.get(ISA, "")
    if isa not in ISAS:
        raise ValueError(f"${ISA} is {isa!r}; leave it out, or say avx2")
    return {**made, **ISAS[isa]}
