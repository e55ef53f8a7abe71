"""The machine: GPU, driver, limits. No results, but the conditions of the others."""

import os
import platform
import resource
from pathlib import Path

from benchmarks.gpu_check.raw import Gpu
from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import MIB, Settings, host_available
from swapd.device.nvml import Nvml
from swapd.shared.units import size

#: Name of the attribute, and its name in the table.
_ATTRIBUTES = (
    ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "chunks as descriptors"),
    ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "virtual memory management"),
    ("ASYNC_ENGINE_COUNT", "copy engines"),
    ("READ_ONLY_HOST_REGISTER_SUPPORTED", "read-only host memory can be pinned"),
    ("HOST_REGISTER_SUPPORTED", "host memory can be pinned"),
    ("CAN_USE_64_BIT_STREAM_MEM_OPS", "64-bit waits in streams"),
    ("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", "pinned memory has one address"),
    ("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES", "GPU uses the host's page tables"),
    ("MPS_ENABLED", "MPS"),
    ("INTEGRATED", "shares memory with the host"),
)


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    gpu = Gpu(settings)
    _the_gpu(check, gpu)
    for attribute, called in _ATTRIBUTES:
        with check.part(called):
            check.row(called, gpu.attribute(attribute))
    with check.part("other use of the GPU"):
        _others(check, gpu)
    _the_host(check)
    with check.part("torch"):
        _torch(check, settings)


def _the_gpu(check: Check, gpu: Gpu) -> None:
    free, total = gpu.memory()
    check.row("GPU", f"{gpu.product}, {gpu.uuid}")
    major, minor = (gpu.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    check.row("compute capability", f"{major}.{minor}")
    check.row("memory", f"{size(free)} free of {size(total)}")
    check.row("granularity of allocations", gpu.granularity() / MIB, "MiB")
    version = gpu.call(gpu.api.cuDriverGetVersion)
    check.row("driver", f"for CUDA {version // 1000}.{version % 1000 // 10}", note=_kernel_module())


def _kernel_module() -> str:
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""
    return first.removeprefix("NVRM version:").strip()


def _others(check: Check, gpu: Gpu) -> None:
    nvml = Nvml(gpu.uuid)
    notes = nvml.notes(mps=bool(gpu.attribute("MPS_ENABLED")))
    uses = nvml.processes()
    nvml.close()
    check.row("notes of swapd on the GPU", "; ".join(notes) or "none")
    said = ", ".join(f"{use.name} ({use.pid}) {size(use.nbytes)}" for use in uses)
    check.row("other processes on the GPU", len(uses), note=said)


def _the_host(check: Check) -> None:
    check.row("kernel", platform.release(), note=platform.machine())
    check.row("cores", len(os.sched_getaffinity(0)))
    check.row("host memory available", size(host_available()))
    for letter, limit in (("l", resource.RLIMIT_MEMLOCK), ("n", resource.RLIMIT_NOFILE)):
        soft, hard = (
            "unlimited" if value == resource.RLIM_INFINITY else str(value)
            for value in resource.getrlimit(limit)
        )
        check.row(f"ulimit -{letter}", soft, note=f"hard limit {hard}")
    pages = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    check.row("huge pages for memfds", pages.read_text().strip() if pages.exists() else "unknown")
    iommu = Path("/sys/kernel/iommu_groups")
    check.row("IOMMU groups", len(list(iommu.iterdir())) if iommu.exists() else 0)


def _torch(check: Check, settings: Settings) -> None:
    import torch

    check.row("torch", torch.__version__, note=f"built for CUDA {torch.version.cuda}")
    if not settings.stub:
        check.holds("torch sees the GPU", torch.cuda.is_available())
