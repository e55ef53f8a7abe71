"""A daemon for each test, strict, and models that are built once."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.guarantees.harness import Daemon


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The number of threads decides the order of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def device() -> Iterator[Callable[[int], Daemon]]:
    """Call it with a budget in MiB for a daemon. The fixture stops and checks the daemon at the
    end.
    """
    # a short path, since it contains sockets
    folder = Path(tempfile.mkdtemp(prefix="swapd-", dir="/tmp"))
    started: list[Daemon] = []

    def start(budget_mib: int) -> Daemon:
        started.append(Daemon(folder / "d", folder / "log", budget=f"{budget_mib}MiB"))
        return started[-1]

    try:
        yield start
        for daemon in started:
            daemon.close()
    finally:
        for daemon in started:
            daemon.discard()
        shutil.rmtree(folder, ignore_errors=True)
