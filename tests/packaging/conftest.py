"""The interpreters that the package is installed with."""

import pytest

from tests.packaging.interpreters import found, supported


def pytest_report_header() -> str:
    there = found()
    missing = ", ".join(version for version in supported() if version not in there) or "none"
    return f"installed with Python {', '.join(there)}; not on this machine: {missing}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "interpreter" in metafunc.fixturenames:
        there = found()
        metafunc.parametrize("interpreter", there.values(), ids=list(there))
