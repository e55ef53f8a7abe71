"""`python -m tests.guarantees.failing_saves serve`: a daemon that fails every third save."""

import itertools
from typing import Any

from swapd.cli import main
from swapd.device import DeviceError, HostDevice
from swapd.shared.protocol import Runs

_saves = itertools.count()
_copy_out = HostDevice.copy_out


def copy_out(device: HostDevice, runs: Runs, target: int, nbytes: int, **told: Any) -> None:
    """Copies half of the bytes before it fails, like an interrupted copy."""
    if next(_saves) % 3:
        _copy_out(device, runs, target, nbytes, **told)
        return
    first = runs[0][0]
    _copy_out(device, ((first, 1),), target, min(nbytes, device.chunk_bytes))
    raise DeviceError("the bus has failed")


if __name__ == "__main__":
    HostDevice.copy_out = copy_out  # type: ignore[method-assign, assignment]
    main()
