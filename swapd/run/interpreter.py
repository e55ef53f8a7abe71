"""Asks the Python of a command line for the folder of a package."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path, PurePath

from swapd.plan.advise import PlanError

#: Longest start of an interpreter: its site may be on a network.
ASKED_S = 60.0
#: Longer than the first two lines of any script.
_HEAD_BYTES = 4096
#: Prints the folder of a package without importing it. Ignores the current folder for a script.
_WHERE = """
import sys
from importlib.util import find_spec
if sys.argv[2] == "script":
    sys.path = [p for p in sys.path if p]
spec = find_spec(sys.argv[1])
for folder in spec.submodule_search_locations if spec else ():
    print(folder)
    break
"""


def folder_of(package: str, words: Sequence[str]) -> Path:
    """The folder of a package in this command's Python. Blocks. Raises: PlanError."""
    python, script = _python(words)
    asked = [*python, "-c", _WHERE, package, "script" if script else "module"]
    try:
        done = subprocess.run(
            asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASKED_S
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise PlanError(f"{shlex.join(python)}, which {words[0]} runs on: {exc}") from exc
    if not (said := done.stdout.strip()):
        why = f": {done.stderr.strip().splitlines()[-1]}" if done.stderr.strip() else ""
        raise PlanError(
            f"{shlex.join(python)}, which {words[0]} runs on, has no {package}{why}: install it "
            "there"
        )
    return Path(said)


def _python(words: Sequence[str]) -> tuple[list[str], bool]:
    """The interpreter, and whether it runs a script. Raises: PlanError."""
    found = shutil.which(words[0])
    if found is None:
        raise PlanError(f"there is no command {words[0]!r}: install it, or write its whole path")
    if PurePath(words[0]).name.startswith("python"):
        return [found], False
    if (named := _named_in(Path(found))) is not None:
        return named, True
    beside = Path(found).resolve().with_name("python")
    if beside.exists():
        return [str(beside)], True
    raise PlanError(f"the Python of {found} is unknown: its first line does not name one")


def _named_in(script: Path) -> list[str] | None:
    """The Python in its first line; in its second, if the first is too long for the kernel."""
    try:
        with script.open("rb") as file:
            first, second, *_ = [*file.read(_HEAD_BYTES).decode().splitlines(), "", ""]
        line = second.replace("'''exec'", "").split('"$0"')[0] if first == "#!/bin/sh" else first
        words = shlex.split(line.removeprefix("#!"))
    except (OSError, ValueError):
        return None
    if words and PurePath(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S"]
    return words if words and PurePath(words[0]).name.startswith("python") else None
