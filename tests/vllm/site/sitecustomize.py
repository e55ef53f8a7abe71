"""Run by Python at the start of every process of these tests, vLLM's own included.

The torchvision that pip installs is built for CUDA. Beside a CPU build of torch its compiled part
does not load, and its Python part then stops at two operators that nobody has declared. Here they
are declared just before it is imported; nothing calls them.

$TESTS_VLLM_ISA=avx2 makes of a CPU with AVX-512 one that has AVX2 alone, for all that ask torch:
vLLM, for its kernels and attention, and torch's own compiler.

$TESTS_VLLM_TRITON names a folder with Triton, whose interpreter then runs vLLM's kernels. vLLM uses
a Triton without a GPU only if that says that it compiles for a CPU.
"""

import os
import sys
from importlib.abc import MetaPathFinder
from types import SimpleNamespace
from typing import Any


class DeclaresOperators(MetaPathFinder):
    """Finds nothing; sees `import torchvision` coming."""

    def __init__(self) -> None:
        self._declared: Any = None  # an operator lasts as long as its Library

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torchvision" and self._declared is None:
            import torch

            library: Any = torch.library
            self._declared = library.Library("torchvision", "DEF")
            boxes = "Tensor dets, Tensor scores"
            self._declared.define(f"nms({boxes}, float iou_threshold) -> Tensor")
            self._declared.define(f"qnms({boxes}, float iou_threshold) -> Tensor")


class LacksAVX512(MetaPathFinder):
    """Finds nothing; sees `import vllm` coming."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "vllm":
            import torch

            better = ("avx512", "avx10", "amx")
            has = torch.cpu.get_capabilities()
            lacks = {name: value for name, value in has.items() if not name.startswith(better)}
            torch.cpu.get_capabilities = lambda: lacks  # type: ignore[assignment]


class HasTriton(MetaPathFinder):
    """Finds nothing; sees `import vllm` coming."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "vllm":
            from triton import backends

            driver = SimpleNamespace(is_active=lambda: True)
            backends.backends.clear()
            backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


if triton := os.environ.get("TESTS_VLLM_TRITON"):  # noqa: TID251
    sys.path.append(triton)
    sys.meta_path.insert(0, HasTriton())
if os.environ.get("TESTS_VLLM_ISA") == "avx2":  # noqa: TID251
    sys.meta_path.insert(0, LacksAVX512())
sys.meta_path.insert(0, DeclaresOperators())
