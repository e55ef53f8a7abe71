"""`python -m tests.guarantees.held_save serve`: a daemon whose device stops in its first save.

Half of it is copied before. It continues when a process has opened `door(runtime_dir)` for writing.
"""

import itertools
import os
import sys
from pathlib import Path
from typing import Any

from swapd.cli import main
from swapd.device import HostDevice
from swapd.shared.protocol import Runs

_saves = itertools.count()
_copy_out = HostDevice.copy_out


def door(runtime_dir: Path) -> Path:
    """The pipe that resumes the save; the process that starts the daemon makes it."""
    return runtime_dir.with_suffix(".door")


def copy_out(device: HostDevice, runs: Runs, target: int, nbytes: int, **told: Any) -> None:
    if not next(_saves):
        half = tuple((start, n // 2) for start, n in told["only"] or ((0, nbytes),))
        _copy_out(device, runs, target, nbytes, only=half)
        os.close(os.open(door(Path(sys.argv[sys.argv.index("--runtime-dir") + 1])), os.O_RDONLY))
    _copy_out(device, runs, target, nbytes, **told)


if __name__ == "__main__":
    HostDevice.copy_out = copy_out  # type: ignore[method-assign, assignment]
    main()
