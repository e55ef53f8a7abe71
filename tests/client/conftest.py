"""A second client, for tests that need no daemon of their own."""

from collections.abc import Iterator

import pytest

import swapd_client
from swapd import spawn
from swapd_client import Client


@pytest.fixture
def other(daemon: spawn.Spawned) -> Iterator[Client]:
    with swapd_client.connect(daemon.folder) as other:
        yield other
