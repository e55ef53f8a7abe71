"""Finds the interpreters on this machine that the package supports."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.processes import ROOT


@cache
def supported() -> list[str]:
    """The versions that pyproject.toml lists, as "3.12"."""
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', _pyproject())


@cache
def found() -> dict[str, Path]:
    """An interpreter that starts, by version; this one for its own version."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {own: Path(sys.executable)}
    for version in supported():
        if version not in found and (path := next(filter(_starts, _candidates(version)), None)):
            found[version] = path
    return {version: found[version] for version in supported() if version in found}


def _pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text()


def _candidates(version: str) -> Iterator[Path]:
    if on_path := shutil.which(f"python{version}"):
        yield Path(on_path)
    yield from Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")


def _starts(python: Path) -> bool:
    """Whether it runs and can make an environment; pyenv's shims may lead nowhere."""
    command = [str(python), "-c", "import ensurepip, ssl, venv"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
