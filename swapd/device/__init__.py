"""The only package that knows what memory is. `open_device` chooses the backend."""

from swapd.device.base import Device, DeviceError
from swapd.device.host import HostDevice

__all__ = ["Device", "DeviceError", "HostDevice", "open_device"]


def open_device(name: str, budget: int, chunk: int, bandwidth: float | None) -> Device:
    """Open the device called `name` ("host") with an arena of `budget` bytes.

    `chunk` is in bytes, `bandwidth` in bytes per second (None: as fast as it goes).
    Blocking: allocates and touches the whole arena. Raises: DeviceError.
    """
    if name == "host":
        return HostDevice(budget, chunk, bandwidth)
    raise DeviceError(f"device {name!r} is not supported by this version; use --device host")
