"""The test files that reach each file of the product, and `python -m tests.mutants.reached`.

`reached.json` has, for each product file, the test files that call most of its functions in the
least time, the best one first; and the seconds of these and of each quick test file. It only
chooses tests, so an old one is not wrong: for a file that it lacks, those of its neighbours run.

The command measures them anew, in a quarter of an hour: each function of a copy of the tree notes
its first call under each test, in every process. One test at a time runs in a copy, so that the
notes are its own.
"""

import ast
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MAP = Path(__file__).with_name("reached.json")
CLIENT = "client/swapd_client"
#: The files of each group.
GROUPS = {
    "core": ["swapd/core/**/*.py"],
    "daemon": ["swapd/daemon/*.py"],
    "device": ["swapd/device/*.py"],
    "client": [f"{CLIENT}/{part}*.py" for part in ("", "leases/", "memory/", "session/**/")],
    "offload": [f"{CLIENT}/offload/*.py"],
}
#: These tests read the source, so any change fails them.
READ_THE_SOURCE = ("tests/test_docs.py", "tests/test_layers.py", "tests/test_prose.py")
#: Test files beyond this many add nothing that is worth their time.
FILES_MAX = 16
#: A test file that takes less may be tried for any file of its part.
QUICK_S = 2.0
#: Copies of the tree, each for a share of the test files.
AT_ONCE = 2
#: Seconds that a test file costs beside its tests.
SET_UP_S = 3

#: In the copy: notes of each process, also of those with an environment of their own.
HITS = """
import os
_seen = set()
_now = os.path.join(os.path.dirname(__file__), "_reached.now")
def hit(n):
    if n not in _seen:
        _seen.add(n)
        try:
            fd = os.open(os.readlink(_now), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        except OSError:
            return
        os.write(fd, b"%d\\n" % n)
        os.close(fd)
"""
#: The keeper runs without swapd.
IMPORT = """
try:
    from swapd._reached import hit as _hit
except ImportError:
    _hit = int
"""
PLUGIN = """
import os, zlib
from time import monotonic  # some tests replace time.monotonic
from swapd import _reached
_begun = {}
def pytest_ignore_collect(collection_path):
    mine, of = map(int, os.environ["SWAPD_REACHED_SHARE"].split("/"))
    name = collection_path.name
    return name.startswith("test_") and zlib.crc32(name.encode()) % of != mine or None
def pytest_runtest_setup(item):
    note = f"{os.environ['SWAPD_REACHED_IN']}/{os.getpid()}-{len(_begun)}"
    os.symlink(note, _reached._now + ".new")
    os.replace(_reached._now + ".new", _reached._now)
    _reached._seen.clear()
    _begun[item.nodeid] = monotonic()
def pytest_runtest_teardown(item):
    with open(os.readlink(_reached._now) + ".test", "a") as file:
        file.write(f"{monotonic() - _begun[item.nodeid]} {item.nodeid}")
"""


def files(tree: Path, group: str) -> list[Path]:
    return sorted({path for pattern in GROUPS[group] for path in tree.glob(pattern)})


def copied(to: Path) -> Path:
    """A copy of the tree, without what is built and installed in it."""
    made = (".git", ".venv*", ".*_cache", ".hypothesis", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*made))
    return to


def instrument(tree: Path) -> list[str]:
    """Have each function note its calls. Returns the file of each function, by number."""
    (tree / "swapd" / "_reached.py").write_text(HITS)
    (tree / "reached_plugin.py").write_text(PLUGIN)
    homes: list[str] = []
    for path in [path for group in GROUPS for path in files(tree, group)]:
        module = ast.parse(path.read_text())
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                call = ast.parse(f"_hit({len(homes)})").body
                node.body[bool(ast.get_docstring(node)) : 0] = call
                homes.append(str(path.relative_to(tree)))
        at = 1 if ast.get_docstring(module) else 0
        module.body[at:0] = ast.parse(IMPORT).body
        path.write_text(ast.unparse(ast.fix_missing_locations(module)))
    return homes


def chosen(
    functions: dict[str, set[int]], of_all: dict[str, int], seconds: dict[str, float]
) -> list[str]:
    """The test files, the one first that adds most for its time to those before it.

    `functions` of the file that each reaches, and `of_all` files together: a test of little else
    comes earlier. A function that few test files reach adds more than others, and one that was
    reached before adds half as much.
    """
    weights = Counter(number for found in functions.values() for number in found)
    worth = {number: 1 / files for number, files in weights.items()}
    price = {
        test: (seconds[test] + SET_UP_S) * math.sqrt(of_all[test] / len(found))
        for test, found in functions.items()
    }
    order: list[str] = []
    while len(order) < min(FILES_MAX, len(functions)):
        best = max(
            sorted(functions.keys() - order),
            key=lambda test: sum(worth[n] for n in functions[test]) / price[test],
        )
        order.append(best)
        worth |= {number: worth[number] / 2 for number in functions[best]}
    return order


def tests_of(path: Path, seconds: float) -> list[str]:
    """The tests for a product file that take so long together, or the first one alone.

    The quick ones of its part come last: they check more of what it promises than which functions
    they reach can say.
    """
    known = json.loads(MAP.read_text())
    tests: list[str] = known["tests"].get(str(path)) or [
        test
        for neighbour, found in known["tests"].items()
        if Path(neighbour).parent == path.parent
        for test in found[:1]
    ]
    group = next(group for group in GROUPS if ROOT / path in files(ROOT, group))
    own = re.compile("tests/[^/]*$" if group == "daemon" else f"tests/{group}/")
    quick = [t for t, s in known["seconds"].items() if own.match(t) and s < QUICK_S]
    took = 0.0
    those: list[str] = []
    for test in dict.fromkeys([*tests, *quick]):
        if (ROOT / test).exists() and (not those or took + known["seconds"][test] < seconds):
            took += known["seconds"][test]
            those.append(test)
    return those


def measure(options: list[str]) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="swapd-reached-") as folder:
        notes = Path(folder) / "notes"
        notes.mkdir()
        command = [sys.executable, "-m", "pytest", "-q", "-preached_plugin", "-pno:xdist"]
        running = []
        for i in range(AT_ONCE):
            tree = copied(Path(folder) / f"tree{i}")
            homes = instrument(tree)
            env = {
                "SWAPD_REACHED_IN": str(notes),
                "SWAPD_REACHED_SHARE": f"{i}/{AT_ONCE}",
                "PYTHONPATH": f"{tree}:{tree}/client",
            }
            words = ["env", *(f"{name}={value}" for name, value in env.items())]
            running.append(subprocess.Popen([*words, *command, *options], cwd=tree))
        for one in running:
            one.wait()
        return read(notes, homes)


def read(notes: Path, homes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The map, from the notes of all tests."""
    functions: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    seconds: dict[str, float] = defaultdict(float)
    for path in notes.glob("*.test"):
        took, _, name = path.read_text().partition(" ")
        test = name.partition("::")[0]
        seconds[test] += float(took)
        if test not in READ_THE_SOURCE and path.with_suffix("").exists():
            for number in map(int, path.with_suffix("").read_text().split()):
                functions[homes[number]][test].add(number)
    of_all = Counter(test for by in functions.values() for test, found in by.items() for _ in found)
    tests = {home: chosen(by, of_all, seconds) for home, by in sorted(functions.items())}
    named = {test for found in tests.values() for test in found}
    named.update(test for test, took in seconds.items() if took < QUICK_S)
    return {"seconds": {test: round(seconds[test], 1) for test in sorted(named)}, "tests": tests}


if __name__ == "__main__":
    MAP.write_text(json.dumps(measure(sys.argv[1:]), indent=1) + "\n")
