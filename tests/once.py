"""What takes long, and several tests look at, is made once, by whichever worker comes first."""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """What `make(path)` has written in this run, a file or a folder.

    Blocks while another worker makes it. One that raises leaves nothing, and the next to ask makes
    it.
    """
    own = factory.getbasetemp()
    common = own.parent if own.name.startswith("popen-") else own  # of all workers, if there are
    path = common / name
    with open(common / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            new = common / f"{name}.new"
            make(new)
            new.replace(path)
    return path
