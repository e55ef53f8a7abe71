"""Stages on a real strict daemon with room for one of them."""

from collections.abc import Iterator

import pytest

from swapd_client.vllm.stage import turns
from tests.guarantees.harness import Daemon
from tests.offload.nursery import strict_daemon
from tests.plugin.test_stage import PATIENCE_S, Scene


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon of 16 MiB, strict: reading weights without a lease is a fault."""
    with strict_daemon() as daemon:
        yield daemon


@pytest.fixture
def scene(daemon: Daemon) -> Iterator[Scene]:
    made = Scene(daemon)
    yield made
    made.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stage gives way merely because a test is slow."""
    monkeypatch.setattr(turns, "IDLE_S", PATIENCE_S)
