"""`make` builds a World, which checks the guarantees after every event.

`test_mutations.py` runs the same functions over a core that has a bug.
"""

import pytest

from tests.core.world import Make, World


@pytest.fixture
def make() -> Make:
    return World
