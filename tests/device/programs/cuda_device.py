"""A process that opens the CUDA device and prints the results.

`python cuda_device.py CASE` runs the function CASE.
"""

import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from swapd.device import DeviceError, DeviceLost, open_device
from swapd.shared import vm

MIB = 1 << 20


def with_few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
    open_device("cuda", 10 * MIB, 2 * MIB, None).close()
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))  # noqa: T201
    try:
        open_device("cuda", 200 * MIB, 2 * MIB, None)
    except DeviceError as exc:
        print(exc)  # noqa: T201


def use() -> None:
    device = open_device("cuda", 2 * MIB, 2 * MIB, None)
    said = device.use()
    print(*[(p.pid, p.nbytes) for p in said.processes], *said.notes, sep="\n")  # noqa: T201
    device.close()


def lose_it() -> None:
    """Use every method, though the device is lost at the first call; then close it."""
    memory = vm.map_anonymous(32 * MIB)
    device = open_device("cuda", 32 * MIB, 2 * MIB, None)
    fds = len(os.listdir("/proc/self/fd"))
    device.pin(memory, 8 * MIB, writable=True)
    everything: dict[str, Callable[[], object]] = {
        "copy_in": lambda: device.copy_in(((0, 16),), memory, 32 * MIB),
        "copy_out": lambda: device.copy_out(((0, 16),), memory, 32 * MIB),
        "pin": lambda: device.pin(memory + 16 * MIB, MIB, writable=True),
        "lend": lambda: device.lend(((0, 1),)),
        "use": lambda: device.use(),
        "again": lambda: device.copy_in(((0, 1),), memory, MIB),
    }
    for name, act in everything.items():
        try:
            act()
        except DeviceLost as exc:
            print(name, exc)  # noqa: T201
        else:
            print(name, "did it")  # noqa: T201
    device.unpin(memory)
    vm.free(memory, 32 * MIB)
    device.export(15, writable=False).close()
    device.close()
    device.close()
    print(fds - len(os.listdir("/proc/self/fd")), threading.active_count())  # noqa: T201


def lose_it_at_the_start() -> None:
    """Print the error, and the number of descriptors that it left."""
    open_device("cuda", 2 * MIB, 2 * MIB, None).close()
    before = os.listdir("/proc/self/fd")
    faults = Path(os.environ["FAKECUDA_FAULTS"])  # noqa: TID251
    faults.write_text("cuMemMap 719 after=2 sticky\n")
    try:
        open_device("cuda", 16 * MIB, 2 * MIB, None)
    except DeviceLost as exc:
        print(exc)  # noqa: T201
    after = os.listdir("/proc/self/fd")
    print(len(after) - len(before))  # noqa: T201


if __name__ == "__main__":
    globals()[sys.argv[1]]()
