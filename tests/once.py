"""Slow set-ups that several tests use: the first worker that needs one makes it for all."""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The file or folder that `make(path)` has written in this run.

    Blocks while another worker makes it. If `make` raises, nothing is left, and the next caller
    tries again.
    """
    own = factory.getbasetemp()
    common = own.parent if own.name.startswith("popen-") else own  # of all workers
    path = common / name
    with open(common / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            new = common / f"{name}.new"
            make(new)
            new.replace(path)
    return path
