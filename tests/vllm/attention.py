"""Attention for vllm-omni's diffusion models on a CPU: torch's, as in its backend for CUDA."""

from typing import Any

from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuImpl(SDPAImpl):  # type: ignore[misc]
    def forward(self, *given: Any, **named: Any) -> Any:
        return self.forward_cuda(*given, **named)  # nothing in it needs CUDA


class CpuBackend(SDPABackend):  # type: ignore[misc]
    @staticmethod
    def get_impl_cls() -> type[CpuImpl]:
        return CpuImpl
