"""Keeps the GPU's device file open, so that the driver keeps it initialised between sections.

If no process has it open, the driver shuts the GPU down, and takes a second or more to start it
again. This changes no setting. Stdlib only.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROC = Path("/proc/driver/nvidia/gpus")
DEV = Path("/dev")


@contextmanager
def device(uuid: str, proc: Path = PROC, dev: Path = DEV) -> Iterator[list[str]]:
    """In the block, the files of the GPU `uuid` are open; yields them, or [] if none can be opened.

    These are all GPUs' files if the driver does not tell which file is whose. Processes started in
    the block do not inherit them.
    """
    found = _file_of(uuid, proc, dev) or sorted(dev.glob("nvidia[0-9]*"))
    held: dict[str, int] = {}
    for path in found:
        with suppress(OSError):
            held[str(path)] = os.open(path, os.O_RDWR)
    try:
        yield list(held)
    finally:
        for fd in held.values():
            os.close(fd)


def _file_of(uuid: str, proc: Path, dev: Path) -> list[Path]:
    for path in proc.glob("*/information"):
        with suppress(OSError):
            said = path.read_text(encoding="utf-8")
            minor = re.search(r"^Device Minor:\s*(\d+)", said, re.MULTILINE)
            if uuid in said and minor:
                return [dev / f"nvidia{minor[1]}"]
    return []
