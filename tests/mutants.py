"""`make mutants`: changes the product's behaviour in one place, and runs the tests of that area.

The places are a seeded sample. Each change (a mutant) is made in a copy of the tree, in a temporary
folder. A mutant that survives shows a promise without a test, unless it is the same program.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLIENT = "client/swapd_client"
#: The files of each area, and its tests.
AREAS = {
    "core": ("swapd/core/**/*.py", "tests/core"),
    "daemon": ("swapd/daemon/*.py", "tests/test_*.py tests/guarantees tests/cuda"),
    "device": ("swapd/device/*.py", "tests/device tests/cuda"),
    "client": (
        f"{CLIENT}/*.py {CLIENT}/leases/*.py {CLIENT}/memory/*.py {CLIENT}/session/**/*.py",
        "tests/client tests/guarantees",
    ),
    "offload": (f"{CLIENT}/offload/*.py", "tests/offload"),
}
#: These tests read the source, so any change fails them.
READ_THE_SOURCE = [
    *("tests/core/test_mutations.py", "tests/core/test_readme.py", "tests/test_docs.py"),
    *("tests/test_layers.py", "tests/test_prose.py", "tests/test_tables.py"),
]
#: Seconds for the tests of one mutant. A mutant that makes its tests slower counts as caught.
LIMIT_S = 1800

OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,  # codespell:ignore
}
OPPOSITE |= {value: key for key, value in OPPOSITE.items()}

#: Puts other nodes in the place of a node.
Put = Callable[[list[ast.AST]], None]


def changes(node: ast.AST) -> Iterator[list[ast.AST]]:
    """The nodes that may replace a statement or an expression, each with another behaviour."""
    match node:
        case ast.Compare(left, [op], others) if type(op) in OPPOSITE:
            yield [ast.Compare(left, [OPPOSITE[type(op)]()], others)]
        case ast.BoolOp(op, values):
            yield [ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)]
        case ast.Constant(bool(value)):
            yield [ast.Constant(not value)]
        case ast.Constant(int(value)):
            yield [ast.Constant(value + 1)]
        case ast.If(test) | ast.While(test) | ast.IfExp(test) if not isinstance(test, ast.Compare):
            negated = ast.UnaryOp(ast.Not(), test)
            yield [type(node)(**{**dict(ast.iter_fields(node)), "test": negated})]
        case ast.Try(body, [], _, [_, *_] as last):
            yield [*body, *last]
        case ast.Try(body, handlers, orelse, [_, *_] as last):
            yield [ast.Try(body, handlers, orelse, []), *last]
        case ast.ExceptHandler(ast.expr(), name, body):
            yield [ast.ExceptHandler(ast.Tuple([]), name, body)]  # it catches nothing
        case ast.With(items, body) if any(w in ast.unparse(items[0]) for w in ("lock", "suppress")):
            yield [*body]
        case ast.Expr(ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete() | ast.Raise():
            yield [ast.Pass()]
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield [ast.Pass()]


def sites(node: ast.AST) -> Iterator[tuple[ast.AST, list[ast.AST], Put]]:
    """Every node of a tree that may change, its replacement, and the function that replaces it.

    Leaves out types, messages, assertions and `__repr__`.
    """
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Assert):
                continue
            if getattr(child, "name", "") == "__repr__" or ast.unparse(child).startswith("log."):
                continue
            for new in changes(child):
                yield child, new, partial(_put, node, field, i if isinstance(value, list) else None)
            yield from sites(child)


def _put(node: ast.AST, field: str, i: int | None, new: list[ast.AST]) -> None:
    if i is None:
        setattr(node, field, new[0])
    else:
        getattr(node, field)[i : i + 1] = new


def paths(tree: Path, patterns: str) -> list[Path]:
    return [path for pattern in patterns.split() for path in sorted(tree.glob(pattern))]


def failed(tree: Path, tests: str, *options: str) -> list[str] | None:
    """The tests of a tree that fail; None if all pass, and [] if they ended in another way."""
    command = [sys.executable, "-m", "pytest", "-qrfE", "-n4", "--dist=worksteal", "--timeout=300"]
    command += ["-pno:cacheprovider", *(f"--ignore={path}" for path in READ_THE_SOURCE), *options]
    process = subprocess.Popen(
        [*command, *map(str, paths(tree, tests))],
        cwd=tree,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        words = [line.split() for line in process.communicate(timeout=LIMIT_S)[0].splitlines()]
    except subprocess.TimeoutExpired:
        return []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if not process.returncode:
        return None
    return [line[1] for line in words if line and line[0] in ("FAILED", "ERROR")]


def run(tree: Path, area: str, count: int, seed: int) -> str:
    """Print each mutant; return the row of the table."""
    files, tests = AREAS[area]
    broken = failed(tree, tests)
    if broken == []:
        sys.exit(f"the tests of {area} did not run to their end: try `make unit UNIT='{tests}'`")
    for test in broken or ():
        print(f"left out, fails without a mutant: {test}", flush=True)  # noqa: T201
    every = [
        (path, i)
        for path in paths(ROOT, files)
        for i, _ in enumerate(sites(ast.parse(path.read_text())))
    ]
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    caught = 0
    for path, i in chosen:
        module = ast.parse(path.read_text())
        old, new, put = list(sites(module))[i]
        said = [ast.unparse(node).splitlines()[0] for node in (old, new[0])]
        put(new)
        name = path.relative_to(ROOT)
        (tree / name).write_text(ast.unparse(ast.fix_missing_locations(module)))
        survived = failed(tree, tests, "-x", *(f"--deselect={one}" for one in broken or ())) is None
        shutil.copyfile(path, tree / name)
        caught += not survived
        print(  # noqa: T201
            f"{'SURVIVED' if survived else 'caught':8}  {name}:{getattr(old, 'lineno', '')}  "
            f"{said[0]}  ->  {said[1]}",
            flush=True,
        )
    return f"{area:8}  {caught:6}  {len(chosen) - caught:8}  of {len(every)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--area", choices=AREAS, action="append", help="default: all")
    parser.add_argument("--count", type=int, default=20, help="mutants of each area")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swapd-mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "dist"))
        rows = [
            run(tree, area, options.count, options.seed) for area in options.area or list(AREAS)
        ]
    print("area      caught  survived", *rows, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
