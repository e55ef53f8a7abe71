"""Fixtures that several folders of tests share."""

from collections.abc import Iterator

import pytest

from tests.guarantees import harness


@pytest.fixture
def world() -> Iterator[harness.World]:
    """Daemons and workers in processes of their own; ends them, and checks the daemons."""
    with harness.world() as made:
        yield made
