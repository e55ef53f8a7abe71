"""The devices to test: the host; the fake GPU; a real one in a run with `-m gpu`.

A process has one libcuda for good, so a run has the fake one or the real one, never both.
"""

import os
from collections.abc import Iterator

import pytest

from swapd.device.driver import Driver
from tests import fakecuda
from tests.device import backends
from tests.device.backends import Backend


@pytest.fixture
def fake() -> fakecuda.Fake:
    """The fake machine of this process. Its knobs hold for the whole run."""
    return fakecuda.loaded()


@pytest.fixture(scope="session")
def context() -> Iterator[None]:
    """A real GPU's context, kept for the session: making one takes a second or more."""
    driver = Driver(0)
    yield
    driver.close()


@pytest.fixture(params=["host", "fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Each device that can be opened here."""
    if request.param == "host":
        yield backends.HOST
        return
    if request.param == "fake":
        machine = request.getfixturevalue("fake")
        assert isinstance(machine, fakecuda.Fake)
        yield backends.cuda(machine.environment())
        machine.faults()
        assert machine.allocations() == [], "left on the device"
        return
    if request.config.option.markexpr != "gpu":
        pytest.skip("a real GPU takes a run of its own: pytest -m gpu tests/device")
    if not backends.gpu_here():
        pytest.skip("no NVIDIA driver here")
    request.getfixturevalue("context")
    yield backends.cuda(dict(os.environ))  # noqa: TID251
