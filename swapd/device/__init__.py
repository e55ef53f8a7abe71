"""The devices: GPU memory, or host memory in its place. `open_device` chooses the backend."""

from swapd.device.base import (
    ChunksMissing,
    Device,
    DeviceError,
    DeviceLost,
    MemoryUse,
    ProcessUse,
    chunks_in,
)
from swapd.device.host import HostDevice
from swapd.shared.config import HOST_CHUNK, gpu_number

__all__ = [
    "ChunksMissing",
    "Device",
    "DeviceError",
    "DeviceLost",
    "HostDevice",
    "MemoryUse",
    "ProcessUse",
    "number_of",
    "open_device",
]


def open_device(
    name: str,
    budget: int,
    chunk: int,
    bandwidth: float | None,
    pin_limit: int | None = None,
    *,
    in_part: bool = False,
) -> Device:
    """Open the device `name` with an arena of `budget` bytes. Blocks: allocates and touches it all.

    "host" is host memory, "cuda:1" or "cuda1" a GPU by its index, "cuda" the first. `chunk` is in
    bytes, `bandwidth` in bytes per second (host only; None: unlimited), `pin_limit` in bytes of
    host memory (GPUs only; None: the driver's limit). `in_part`: a GPU with too little free memory
    for the budget has `missing` chunks. Raises: DeviceError.
    """
    number = number_of(name, budget, chunk, bandwidth)
    if number is None:
        return HostDevice(budget, chunk, bandwidth)
    # imported here: a daemon on the host device does not need it
    from swapd.device.cuda import CudaDevice

    return CudaDevice(number, budget, chunk, pin_limit, in_part=in_part)


def number_of(name: str, budget: int, chunk: int, bandwidth: float | None) -> int | None:
    """Return the index of the GPU; None: the host. Raises: DeviceError if these settings open no
    device on any machine."""
    number = gpu_number(name)
    if number is None and name != "host":
        raise DeviceError(f"there is no device {name!r}; use --device host, cuda or cuda:0")
    if number is not None and bandwidth is not None:
        raise DeviceError("--bandwidth slows the host device down; leave it out on a GPU")
    chunks_in(budget, chunk, HOST_CHUNK)
    return number
