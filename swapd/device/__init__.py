"""The only package that knows what memory is. `open_device` chooses the backend."""

from swapd.device.base import Device, DeviceError, DeviceLost, MemoryUse, ProcessUse
from swapd.device.host import HostDevice

__all__ = [
    "Device",
    "DeviceError",
    "DeviceLost",
    "HostDevice",
    "MemoryUse",
    "ProcessUse",
    "open_device",
]


def open_device(
    name: str, budget: int, chunk: int, bandwidth: float | None, pin_limit: int | None = None
) -> Device:
    """Open the device called `name` ("host") with an arena of `budget` bytes.

    `chunk` is in bytes, `bandwidth` in bytes per second (None: as fast as it goes),
    `pin_limit` in bytes of host memory (None: as much as the driver takes).
    Blocking: allocates and touches the whole arena. Raises: DeviceError.
    """
    if name == "host":
        return HostDevice(budget, chunk, bandwidth)
    raise DeviceError(f"device {name!r} is not supported by this version; use --device host")
