"""Actions that a worker may not take on the host device's arena.

`python host_device.py CASE ...` runs the function CASE.
"""

import ctypes
import fcntl
import os
import sys

from swapd.device import HostDevice
from swapd.shared import vm


def shut_the_arena() -> None:
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)  # root opens anything
    device = HostDevice(2 << 20, 2 << 20)
    with device.export(0, writable=False) as reader, device.export(0, writable=True) as writer:
        os.fchmod(reader.fileno(), 0)
        for seal in (fcntl.F_SEAL_WRITE, 0x10):
            try:
                fcntl.fcntl(writer.fileno(), fcntl.F_ADD_SEALS, seal)
            except PermissionError:
                continue
            raise AssertionError("sealed by a worker")
    device.export(0, writable=False).close()
    device.export(0, writable=True).close()
    device.close()


def write_a_read_only_export(fd: str, nbytes: str) -> None:
    """Print the results of mapping it writable, and of making a mapping of it writable."""
    try:
        vm.map_shared(int(fd), 0, int(nbytes), writable=True)
    except OSError as exc:
        print(exc.strerror)  # noqa: T201
    at = vm.map_shared(int(fd), 0, int(nbytes), writable=False)
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    failed = mprotect(at, int(nbytes), vm.PROT_READ | vm.PROT_WRITE)
    print(failed, os.strerror(ctypes.get_errno()))  # noqa: T201


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
