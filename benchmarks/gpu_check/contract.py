"""The device contract suite, tests/device, run against this GPU; with pytest, in a process
of its own. Its configuration is written here, so that no plugin is needed."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu_check.rows import Check
from benchmarks.gpu_check.settings import ROOT, Settings

#: So many failures are named.
NAMED = 10

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
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        configuration, results = Path(folder) / "pytest.ini", Path(folder) / "results.xml"
        configuration.write_text(CONFIGURATION, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-c", str(configuration)]
        command += ["--rootdir", str(ROOT), "-p", "no:cacheprovider", f"--junitxml={results}"]
        # on the stub, pytest itself makes one, and runs what it runs everywhere
        command += ["-m", "not gpu" if settings.stub else "gpu"]
        if settings.contract:
            command += ["-k", settings.contract]
        if importlib.util.find_spec("pytest_timeout"):
            command += ["-o", "timeout=60"]
        done = subprocess.run(
            [*command, str(ROOT / "tests" / "device")], cwd=ROOT, text=True, check=False
        )
        if not results.exists():
            check.failed("the device contract", f"pytest ended with {done.returncode}")
            return
        _rows(check, ElementTree.parse(results).getroot())


def _rows(check: Check, results: ElementTree.Element) -> None:
    cases = list(results.iter("testcase"))
    skipped = [case for case in cases if case.find("skipped") is not None]
    failed = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    run = len(cases) - len(skipped)
    if not run:
        why = _message(skipped[0], "skipped") if skipped else "no test was found"
        check.missing("the device contract", why)
        return
    note = f"{len(skipped)} skipped: {_message(skipped[0], 'skipped')}" if skipped else ""
    name = "tests of the device contract that fail"
    check.at_most(name, len(failed), 0, f"of {run}", note)
    for case in failed[:NAMED]:
        why = _message(case, "failure") or _message(case, "error")
        check.failed(str(case.get("name")), why)


def _message(case: ElementTree.Element, kind: str) -> str:
    found = case.find(kind)
    return "" if found is None else (found.get("message") or "").splitlines()[0]
