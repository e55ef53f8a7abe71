"""Searches memory for weights. `python secrets_in_memory.py CASE ...` runs the function CASE."""

import os
import resource
import sys
from pathlib import Path

import swapd_client
from swapd.device import HostDevice


def abort(folder: str) -> None:
    """Write a core dump of all memory, while a lease is held."""
    Path("/proc/self/coredump_filter").write_text("0x7f")
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)
    client = swapd_client.connect(folder)
    secret = bytes(range(1, 65)).hex().encode()  # nowhere else in this form
    part = client.register("a", {"x": secret * 10_000}, mutable=True)
    with client.acquire("a"):
        assert bytes(part.view("x")[:128]) == secret
        del secret
        os.abort()


def open_for_writing() -> None:
    """As a user who may not override file modes, as root may."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    device = HostDevice(2 << 20, 2 << 20)
    with device.export(0, writable=False) as reader:
        path = f"/proc/self/fd/{reader.fileno()}"
        for mode in (os.O_RDWR, os.O_WRONLY):
            try:
                os.open(path, mode)
            except PermissionError as exc:
                print(exc.strerror)  # noqa: T201
        os.close(os.open(path, os.O_RDONLY))
    device.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
