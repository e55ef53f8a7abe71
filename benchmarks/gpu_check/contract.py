"""The device contract suite, tests/device, run against this GPU: by pytest, in this process.

Each test is a row as soon as it has ended, so an aborted run keeps its rows. This module sets
pytest's configuration, so that no plugin is needed.
"""

import importlib.util
import tempfile
from pathlib import Path

import pytest

from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import ROOT, Settings

#: Characters of a failure in a row.
WHY_CHARS = 300

CONFIGURATION = f"""
[pytest]
pythonpath = {ROOT} {ROOT}/client
addopts = --import-mode=importlib
markers =
    gpu: needs an NVIDIA GPU
    slow: takes more than a few seconds
"""


def measure(check: Check, settings: Settings) -> None:
    """The rows of this section."""
    rows = Rows(check)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        configuration = Path(folder) / "pytest.ini"
        configuration.write_text(CONFIGURATION, encoding="utf-8")
        arguments = ["-v", "-c", str(configuration), "--rootdir", str(ROOT)]
        arguments += ["-p", "no:cacheprovider"]
        # on the stub, pytest makes a device, and runs its usual tests
        arguments += ["-m", "not gpu" if settings.stub else "gpu"]
        if settings.contract:
            arguments += ["-k", settings.contract]
        if importlib.util.find_spec("pytest_timeout"):
            arguments += ["-o", "timeout=60"]
        code = pytest.main([*arguments, str(ROOT / "tests" / "device")], plugins=[rows])
    rows.total(int(code))


class Rows:
    """A plugin of pytest: puts a row for each test when it has ended."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._run = 0
        self._failed: set[str] = set()
        self._skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("/")[2]
        if report.skipped:
            self._skipped.append(str(report.longrepr[2]) if report.longrepr else "")  # type: ignore[index]
        elif report.failed:  # also before the test, or after it
            self._failed.add(name)
            self._check.failed(name, _why(report))
        elif report.when == "call":
            self._check.passed(name, report.duration)
        self._run += report.when == "call" and not report.skipped

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
            self._check.failed(report.nodeid, _why(report))

    def total(self, code: int) -> None:
        """Put the total; `code` is pytest's exit code."""
        if not self._run and not self._failed:
            why = self._skipped[0] if self._skipped else f"no test was found (pytest: {code})"
            self._check.missing("the device contract", why)
            return
        note = f"{len(self._skipped)} skipped: {self._skipped[0]}" if self._skipped else ""
        name = "tests of the device contract that fail"
        self._check.at_most(name, len(self._failed), 0, f"of {self._run}", note)


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Pytest's line with the error, from the end of its output."""
    lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return " ".join(lines or report.longreprtext.splitlines()[-1:])[:WHY_CHARS]
