"""`python -m tests.vllm.kernels` loads vLLM's kernels for this CPU, and prints which build that is.

vLLM has several builds (AVX2, AVX-512, AVX-512 with bf16) and takes one that the CPU supports. For
vLLM a failure to load it is only a warning; here it is an error.
"""

import sys
from pathlib import Path

#: An operator that each build has, and each engine needs.
OPERATOR = "cpu_attention_with_kv_cache"


def mapped() -> list[str]:
    """The builds that are mapped into this process, by file name."""
    files = [Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines()]
    return sorted({one.name for one in files if one.match("vllm/_C*.so")})


def main() -> None:
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, OPERATOR):
        sys.exit(
            f"vLLM's kernels do not load on this CPU ({torch.backends.cpu.get_cpu_capability()}): "
            f"there is no operator _C.{OPERATOR}. The warning above says why; vLLM for CPUs needs "
            "x86-64 with AVX2."
        )
    print(*mapped())  # noqa: T201


if __name__ == "__main__":
    main()
