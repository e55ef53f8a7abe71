"""`python -m tests.guarantees.held_load serve`: a daemon whose device stops in a load, or fails it.

`order` sets which of the two, and for which load. Half of the load is copied before. A held load
continues when a process has opened `door(runtime_dir)` for writing.
"""

import os
import sys
from pathlib import Path
from typing import Any, Literal

from swapd.cli import main
from swapd.device import DeviceError, HostDevice
from swapd.shared.protocol import Runs

_copy_in = HostDevice.copy_in


def door(runtime_dir: Path) -> Path:
    """The pipe that resumes the load; the process that starts the daemon makes it."""
    return runtime_dir.with_suffix(".door")


def order(runtime_dir: Path, what: Literal["hold", "fail"], load: int) -> None:
    """Hold or fail the `load`-th load from now on, 1 or more. Once."""
    whole = _orders(runtime_dir).with_suffix(".new")
    whole.write_text(f"{what} {load}")
    whole.rename(_orders(runtime_dir))


def _orders(runtime_dir: Path) -> Path:
    return runtime_dir.with_suffix(".orders")


def copy_in(device: HostDevice, runs: Runs, source: int, nbytes: int, **told: Any) -> None:
    folder = Path(sys.argv[sys.argv.index("--runtime-dir") + 1])
    if not _orders(folder).exists():
        return _copy_in(device, runs, source, nbytes, **told)
    what, load = _orders(folder).read_text().split()
    if int(load) > 1:
        order(folder, "hold" if what == "hold" else "fail", int(load) - 1)
        return _copy_in(device, runs, source, nbytes, **told)
    _orders(folder).unlink()
    _copy_in(device, runs, source, nbytes // 2)
    if what == "fail":
        raise DeviceError("the bus has failed")
    os.close(os.open(door(folder), os.O_RDONLY))
    return _copy_in(device, runs, source, nbytes, **told)


if __name__ == "__main__":
    HostDevice.copy_in = copy_in  # type: ignore[method-assign, assignment]
    main()
