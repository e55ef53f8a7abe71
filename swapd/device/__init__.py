"""The devices: GPU memory, or host memory in its place. `open_device` chooses the backend."""

from swapd.device.base import Device, DeviceError, DeviceLost, MemoryUse, NotAllBack, ProcessUse
from swapd.device.host import HostDevice
from swapd.shared.config import DEVICE_NAME

__all__ = [
    "Device",
    "DeviceError",
    "DeviceLost",
    "HostDevice",
    "MemoryUse",
    "NotAllBack",
    "ProcessUse",
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
    """Open the device `name` with an arena of `budget` bytes. Blocks: allocates and touches the
    whole arena.

    "host" is host memory, "cuda:1" or "cuda1" a GPU by its index, "cuda" the first. `chunk` is in
    bytes, `bandwidth` in bytes per second (host only; None: unlimited), `pin_limit` in bytes of
    host memory (GPUs only; None: the driver's limit). `in_part`: a GPU with too little free memory
    for the budget has `missing` chunks. Raises: DeviceError.
    """
    if name == "host":
        return HostDevice(budget, chunk, bandwidth)
    index = DEVICE_NAME.fullmatch(name)
    if index is None:
        raise DeviceError(f"there is no device {name!r}; use --device host, cuda or cuda:0")
    if bandwidth is not None:
        raise DeviceError("--bandwidth slows the host device down; leave it out on a GPU")
    # imported here: a daemon on the host device does not need it
    from swapd.device.cuda import CudaDevice

    return CudaDevice(int(index[1] or 0), budget, chunk, pin_limit, in_part=in_part)
