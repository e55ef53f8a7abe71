"""Clients leave nothing behind if they are closed twice, or never connected."""

import os
from pathlib import Path

import pytest

from swapd_client import NotRunning, connect

from .conftest import Running


def test_closed_twice_is_closed_once(daemon: Running) -> None:
    client = daemon.client("worker", thinker=2)
    with client:
        client.close()


def test_no_daemon_leaves_no_descriptor(folder: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(NotRunning):
        connect(folder)
    assert set(os.listdir("/proc/self/fd")) == before
