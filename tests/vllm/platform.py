"""vllm-omni's platform for these tests: a CPU that answers its workers' questions about a GPU.

vllm-omni finds it by its own entry point for platforms, in processes with `tests/vllm/site` on
their path.
"""

import contextlib
import os
import resource
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


def _bytes(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def offer() -> str:
    """The platform's class, by name."""
    return f"{__name__}.{Cpu.__name__}"


class Nothing:
    """An event that has happened, or a stream whose work is done."""

    def record(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...


class Cpu(OmniPlatform, CpuPlatform):  # type: ignore[misc]
    """All work is done when the call returns, and the memory is the host's."""

    _omni_enum = OmniPlatformEnum.OOT
    device_control_env_var = "CUDA_VISIBLE_DEVICES"  # to divide GPUs between stages
    Stream = Event = Nothing

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def set_device(cls, device: object) -> None: ...

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def synchronize(cls) -> None: ...

    @classmethod
    def empty_cache(cls) -> None: ...

    @classmethod
    def reset_peak_memory_stats(cls, *given: object) -> None: ...

    @classmethod
    def max_memory_reserved(cls, *given: object) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, *given: object) -> int:
        return 0

    @classmethod
    def get_free_memory(cls, device: object = None) -> int:
        return _bytes("SC_AVPHYS_PAGES")

    @classmethod
    def get_device_memory(cls, device: object = None) -> tuple[int, int]:
        return _bytes("SC_AVPHYS_PAGES"), _bytes("SC_PHYS_PAGES")

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return _bytes("SC_PHYS_PAGES")

    @classmethod
    def get_current_memory_usage(cls, device: object = None) -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0

    @classmethod
    def current_stream(cls) -> Nothing:
        return Nothing()

    @classmethod
    def stream(cls, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return True

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config: Any) -> Any:
        return CpuPlatform.get_default_ir_op_priority(vllm_config)

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "tests.vllm.omni_server.workers.PlainARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "tests.vllm.omni_server.workers.PlainGenerationWorker"

    @classmethod
    def get_diffusion_attn_backend_cls(cls, *given: object, **named: object) -> str:
        return "tests.vllm.attention.CpuBackend"
