"""`swapd doctor`: checks of this machine, with advice."""

import platform
import resource
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from swapd.device.host import available_bytes, least_limit
from swapd.doctor import daemon, host
from swapd.doctor.host import Check

__all__ = ["Check", "examine"]


def examine(folders: Iterable[Path], timeout: float) -> list[Check]:
    """Return all checks, for daemons with these runtime folders."""
    return [
        Check("python", "ok", platform.python_version()),
        host.kernel(platform.system(), platform.release()),
        host.populate(),
        host.memfd_sealing(),
        host.shelving(),
        host.huge_pages(),
        host.pidfd(),
        host.peer_credentials(),
        host.memory(available_bytes(), least_limit()),
        host.open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        host.locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        *chain.from_iterable(
            (host.folder_usable(folder), *daemon.examine(folder, timeout)) for folder in folders
        ),
        host.package("pyzmq", needed=True),
        host.package("msgspec", needed=True),
        host.package("uvloop", needed=True, extra="daemon"),
        host.package("torch", extra="torch"),
        host.package("transformers", extra="demo"),
        *host.gpus(),
    ]
