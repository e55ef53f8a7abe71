"""`python -m tests.vllm.kernels`: has vLLM load its kernels for this CPU, and says which they are.

vLLM comes with several builds of them (AVX2, AVX-512, AVX-512 with bf16) and takes one by what the
CPU can do; that it does not load is only a warning of vLLM's. Here it is an error.
"""

import sys
from pathlib import Path

#: Each build has it, and no engine computes without it.
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
