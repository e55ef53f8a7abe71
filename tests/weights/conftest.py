"""A strict daemon, and a client of it, for tests that need no others."""

from collections.abc import Iterator

import pytest
import torch

import swapd_client
from swapd import spawn
from swapd_client import Client


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def daemon() -> Iterator[spawn.Spawned]:
    with spawn.daemon(budget="64MiB", isolation="strict") as daemon:
        yield daemon


@pytest.fixture
def client(daemon: spawn.Spawned) -> Iterator[Client]:
    with swapd_client.connect(daemon.folder) as client:
        yield client
