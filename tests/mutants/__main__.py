"""`make mutants`: changes the product in one place at a time, and runs tests that reach the file.

The places are a seeded sample, as many of each group. Each change (a mutant) is made in a copy of
the tree. Its tests are those that `reached.json` names for the file; one that survives the best of
them is tried by more. A survivor shows a promise without a test, unless the changed program behaves
as before.
"""

import argparse
import ast
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.mutants.changes import sites
from tests.mutants.reached import GROUPS, ROOT, copied, files, tests_of

#: Seconds that the tests of one mutant may take, by those that they take without it.
SLACK = 4.5
#: Seconds that one test may take.
TEST_S = 90
#: Trees, each with one mutant at a time.
AT_ONCE = 2
CAUGHT, SURVIVED, UNCLEAR = "caught", "SURVIVED", "unclear"


class Mutant(NamedTuple):
    group: str
    #: In the tree.
    path: Path
    #: Which of the file's possible changes it is.
    number: int

    def made(self) -> tuple[str, str]:
        """The changed source, and the description of the change."""
        module = ast.parse((ROOT / self.path).read_text())
        old, new, put = list(sites(module))[self.number]
        said = [ast.unparse(node).splitlines()[0] for node in (old, new[0])]
        put(new)
        place = f"{self.path}:{getattr(old, 'lineno', '')}"
        return ast.unparse(ast.fix_missing_locations(module)), f"{place}  {said[0]}  ->  {said[1]}"


def sample(groups: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, as many of each group as of any other."""
    chosen: list[Mutant] = []
    for i, group in enumerate(groups):
        every = [
            Mutant(group, path.relative_to(ROOT), number)
            for path in files(ROOT, group)
            for number, _ in enumerate(sites(ast.parse(path.read_text())))
        ]
        share = count // len(groups) + (i < count % len(groups))
        chosen += random.Random(seed).sample(every, min(share, len(every)))
    return chosen


def failed(tree: Path, tests: Sequence[str], seconds: float, *options: str) -> list[str] | None:
    """The tests of a tree that fail; None if all pass, and [] if they ended in another way."""
    command = [sys.executable, "-m", "pytest", "-qrfE", "-pno:cacheprovider", "-pno:xdist"]
    process = subprocess.Popen(
        [*command, f"--timeout={min(seconds, TEST_S) - 5}", *options, *tests],
        cwd=tree,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},  # noqa: TID251
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        lines = process.communicate(timeout=seconds)[0].splitlines()
    except subprocess.TimeoutExpired:
        return []
    finally:
        _end(tree, process)
    if not process.returncode:
        return None
    of_tests = [line for line in lines if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return [line.partition(" ")[2].partition(" - ")[0] for line in of_tests]


def _end(tree: Path, process: "subprocess.Popen[str]") -> None:
    """End the tests, and the daemons that a mutant left: these have the path of the tree."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{tree}/".encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


def judge(tree: Path, mutant: Mutant, known: dict[str, bool], quiet_s: float) -> tuple[str, str]:
    """Whether tests that take `quiet_s` without it notice it, or else others that take twice as
    long; and the test that does.

    `known`: tests that have failed, and whether they pass without a mutant. Those that do not are
    left out.
    """
    first = tests_of(mutant.path, quiet_s)
    verdict, test = tried(tree, mutant, known, first, quiet_s)
    more = [test for test in tests_of(mutant.path, 3 * quiet_s) if test not in first]
    if verdict == SURVIVED and more:
        return tried(tree, mutant, known, more, 2 * quiet_s)
    return verdict, test


def tried(
    tree: Path, mutant: Mutant, known: dict[str, bool], tests: Sequence[str], quiet_s: float
) -> tuple[str, str]:
    source, _ = mutant.made()
    seconds = SLACK * quiet_s
    for _ in range(5):
        left_out = [f"--deselect={test}" for test, passes in known.items() if not passes]
        (tree / mutant.path).write_text(source)
        found = failed(tree, tests, seconds, "-x", *left_out)
        shutil.copyfile(ROOT / mutant.path, tree / mutant.path)
        if found is None:
            return SURVIVED, ""
        if not found:
            is_slow = failed(tree, tests, seconds, "-x", *left_out) == []
            return UNCLEAR if is_slow else CAUGHT, "no end"
        test = found[0]
        if test not in known:
            known[test] = failed(tree, [test], seconds) is None
        if known[test]:
            return CAUGHT, test
    return UNCLEAR, test


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--group", choices=GROUPS, action="append", help="default: all")
    parser.add_argument("--count", type=int, default=20, help="of all groups together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=20, help="of tests for each mutant at first, without it"
    )
    options = parser.parse_args()
    groups = options.group or list(GROUPS)
    numbers = {group: {CAUGHT: 0, SURVIVED: 0, UNCLEAR: 0} for group in groups}
    with tempfile.TemporaryDirectory(prefix="swapd-mutants-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for i in range(AT_ONCE):
            trees.put(copied(Path(folder) / f"tree{i}"))
        known: dict[str, bool] = {}

        def run(mutant: Mutant) -> None:
            tree = trees.get()
            try:
                verdict, test = judge(tree, mutant, known, options.seconds)
            finally:
                trees.put(tree)  # an error must not keep the others waiting for it
            numbers[mutant.group][verdict] += 1
            print(f"{verdict:8}  {mutant.made()[1]}  {test}", flush=True)  # noqa: T201

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(run, sample(groups, options.count, options.seed)))
    print("group     caught  survived  unclear")  # noqa: T201
    for group, of in numbers.items():
        print(f"{group:8}  {of[CAUGHT]:6}  {of[SURVIVED]:8}  {of[UNCLEAR]:7}")  # noqa: T201


if __name__ == "__main__":
    main()
