"""`make` builds a World, which checks the guarantees after every event."""

import pytest

from tests.core.world import Make, World


@pytest.fixture
def make() -> Make:
    return World
