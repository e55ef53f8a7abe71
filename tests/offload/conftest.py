"""A strict daemon for the tests of a file, and a client that must hold nothing at the end."""

from collections.abc import Iterator

import pytest
import torch

from swapd_client import Client, connect
from swapd_client.offload.scope import here
from tests.guarantees.harness import Daemon
from tests.offload.nursery import Nursery, strict_daemon


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_held() -> Iterator[None]:
    yield
    assert not here().counts, "this thread's calls count as held"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """16 MiB, strict: an access without a lease is a fault."""
    with strict_daemon() as daemon:
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """A client that holds no lease at the end."""
    with connect(daemon.folder, label="test") as client:
        yield client
        if client.session.error is None:
            assert {c.name: c.leases for c in client.status().components if c.leases} == {}
        assert not client.session.leases


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield
