"""Imports torch and runs a kernel before any time is limited.

The first import reads gigabytes from the disk, and the first kernels load modules onto the GPU.
"""

import time

from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import Settings


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    started = time.perf_counter()
    import torch

    from benchmarks.gpu_check import torchish

    check.row("import of torch, by the first process", time.perf_counter() - started, "s")
    started = time.perf_counter()
    where = torchish.start(settings)
    ones = torch.ones(256, 256, device=where, dtype=torch.bfloat16)
    right = float((ones @ ones).float().mean()) == 256.0
    took = time.perf_counter() - started
    check.holds("torch's first kernels compute", right, f"{took:.3g} s with the context")
