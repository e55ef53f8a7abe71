"""A daemon for each test, and models that are built once."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.guarantees.harness import Daemon
from tests.offload.nursery import strict_daemon


@pytest.fixture
def device() -> Iterator[Callable[[int], Daemon]]:
    """Call it with a budget in MiB for a daemon."""
    with ExitStack() as stack:
        yield lambda budget_mib: stack.enter_context(strict_daemon(f"{budget_mib}MiB"))
