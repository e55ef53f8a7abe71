"""Fixtures that several folders of tests share."""

import gc
import signal
import subprocess
import types
from collections.abc import Iterator

import pytest

from swapd import spawn
from tests import forked
from tests.guarantees import harness


def pytest_configure() -> None:
    """Have processes that tests start hear Ctrl-C: a shell's background jobs pass on that they do
    not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Have what tests collect looked for among their own objects, not in all that is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _daemons_are_forked() -> Iterator[None]:
    """Those of `spawn.daemon` start quickly too."""
    with pytest.MonkeyPatch.context() as patch:
        names = {**vars(subprocess), "Popen": forked.Popen}
        patch.setattr(spawn, "subprocess", types.SimpleNamespace(**names))
        yield


@pytest.fixture
def imported() -> tuple[str, ...]:
    """What the workers of `world` have imported: files whose workers have tensors say torch."""
    return ()


@pytest.fixture
def world(imported: tuple[str, ...]) -> Iterator[harness.World]:
    """Daemons and workers in processes of their own; ends them, and checks the daemons."""
    with harness.world(imported=imported) as made:
        yield made
