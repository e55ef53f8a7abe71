"""Prints the least version that `pyproject.toml` allows of each package, for pip: `make
test-floors`. Without torch, whose least version has no wheel for every Python."""

import re
import tomllib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

EXTRAS = ("daemon", "otel", "top", "web")
#: What the tests themselves need.
OTHERS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "pyyaml")

_BOUND = re.compile(r"([\w.-]+)>=([\d.]+)")


def floors(project: dict[str, Any]) -> list[str]:
    extras = project["optional-dependencies"]
    least = _bounds([*project["dependencies"], *chain.from_iterable(extras.values())])
    wanted = _bounds([*project["dependencies"], *chain.from_iterable(extras[e] for e in EXTRAS)])
    return [f"{name}=={_minor(least[name])}.*" for name in (*wanted, *OTHERS)]


def _bounds(texts: Iterable[str]) -> dict[str, str]:
    return {found[1]: found[2] for text in texts if (found := _BOUND.match(text))}


def _minor(version: str) -> str:
    return version if "." in version else f"{version}.0"


if __name__ == "__main__":
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    print(*floors(pyproject["project"]), sep="\n")  # noqa: T201
