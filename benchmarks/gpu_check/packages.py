"""Packages that this Python lacks, and the command that installs them. Stdlib only."""

import importlib.util
from collections.abc import Iterable

#: Their names for pip, if these differ.
_BY_PIP = {"cuda.bindings": "cuda-bindings", "zmq": "pyzmq"}


def missing(names: Iterable[str]) -> list[str]:
    """The packages that cannot be imported."""
    return [name for name in names if not _is_installed(name)]


def lacking(names: Iterable[str]) -> str:
    """The message about missing packages."""
    names = list(names)
    install = " ".join(_BY_PIP.get(name, name) for name in names)
    return f"needs {', '.join(names)}, which this Python lacks: pip install {install}"


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of "cuda.bindings" not even "cuda"
        return False
