"""Daemons and workers on a machine of their own with a fake GPU, all in processes of their own."""

from collections.abc import Iterator

import pytest

from tests import fakecuda
from tests.cuda.gpu_world import MIB, PROGRAM, World
from tests.guarantees import harness


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[fakecuda.Fake]:
    """A card of 128 MiB for the processes of the test; at the end nothing is left on it."""
    with fakecuda.shown(monkeypatch, total=128 * MIB) as fake:
        yield fake
        assert fake.held_bytes() == 0


@pytest.fixture
def world(fake: fakecuda.Fake, imported: tuple[str, ...]) -> Iterator[World]:
    with harness.world(PROGRAM, imported) as made:
        yield World(made, fake)
