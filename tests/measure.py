"""`make measure`: sizes of the tree, counted from its files, and the files that an acquire passes.

Code lines have no blank lines, comments and docstrings. A private access reads an attribute, or
imports a name, that begins with an underscore and that only other packages define; the methods of
a named tuple are public in spite of their underscore.
"""

import ast
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter
from pathlib import Path

from swapd import spawn
from swapd_client import connect

ROOT = Path(__file__).parents[1]
CLIENT = "client/swapd_client/"
KERNEL = (
    *(f"swapd/{name}/" for name in ("core", "daemon", "device", "shared", "log")),
    *(f"{CLIENT}{name}/" for name in ("leases", "session", "memory")),
)
OF_NAMED_TUPLES = ("_asdict", "_fields", "_make", "_replace")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef

#: A daemon that notes its files: SIGUSR1 begins anew, SIGWINCH writes them to the file argv[1].
NOTING = r"""
import pathlib, runpy, signal, sys, threading
path, seen = pathlib.Path(sys.argv.pop(1)), set()
begun, new = path.with_suffix(".begun"), path.with_suffix(".new")
def note(frame, event, arg):
    seen.add(frame.f_code.co_filename)
signal.signal(signal.SIGUSR1, lambda *_: (seen.clear(), begun.touch()))
signal.signal(signal.SIGWINCH, lambda *_: (new.write_text("\n".join(seen)), new.rename(path)))
threading.setprofile(note)
sys.setprofile(note)
sys.argv[1:1] = ["serve"]
runpy.run_module("swapd", run_name="__main__", alter_sys=True)
"""


def paths(*patterns: str) -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", *patterns]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


def lines(names: list[str]) -> int:
    return sum(len((ROOT / name).read_text().splitlines()) for name in names)


def code_lines(source: str) -> int:
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*skipped, tokenize.ENDMARKER):
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(code)


def package(name: str) -> tuple[str, ...]:
    return Path(name).parts[: 3 if name.startswith("client") else 2]


def private_accesses(sources: dict[str, str], trees: dict[str, ast.Module]) -> int:
    homes: dict[str, set[tuple[str, ...]]] = {}
    for name, source in sources.items():
        for own in re.findall(r"(?:def |class |self\.|^|\")(_[A-Za-z]\w*)", source, re.MULTILINE):
            if own not in OF_NAMED_TUPLES:
                homes.setdefault(own, set()).add(package(name))
    found = 0
    for name, tree in trees.items():
        nodes = list(ast.walk(tree))
        used = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        used += [alias.name for node in imports for alias in node.names]
        found += sum(one in homes and package(name) not in homes[one] for one in used)
    return found


def complexity(function: ast.AST) -> int:
    """The number of paths, as radon counts it."""
    one = ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.Assert | ast.ExceptHandler
    paths = 1
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            paths += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            paths += 1 + len(node.ifs)
        elif isinstance(node, one | ast.match_case):
            paths += 1
    return paths


def files_of_an_acquire() -> int:
    """Those of both sides, for an acquire of a component that evicts another of this process."""
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        note, begun = Path(folder) / "files", Path(folder) / "files.begun"
        program = ("-c", NOTING, str(note))
        with spawn.daemon(program, budget="16MiB") as daemon, connect(daemon.folder) as client:
            for name in ("a", "b"):
                client.register(name, {"data": name.encode().ljust(12 << 20)})
            client.acquire("a").release()
            os.kill(daemon.pid, signal.SIGUSR1)
            while not begun.exists():
                time.sleep(0.01)
            sys.setprofile(lambda frame, *_: seen.add(frame.f_code.co_filename))
            client.acquire("b").release()
            sys.setprofile(None)
            os.kill(daemon.pid, signal.SIGWINCH)
            while not note.exists():
                time.sleep(0.01)
            seen |= set(note.read_text().split("\n"))
    return len([each for each in seen if re.search(r"/(swapd|swapd_client)/", each)])


def main() -> None:
    product = paths("swapd/*.py", "client/*.py")
    sources = {name: (ROOT / name).read_text() for name in product}
    trees = {name: ast.parse(source) for name, source in sources.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    names = Counter(node.name for node in classes)
    kernel = [p for p in product if p.startswith(KERNEL) or re.fullmatch(rf"{CLIENT}\w+\.py", p)]
    rows = {
        "product, lines": lines(product),
        "product, files": len(product),
        "product, code lines": sum(map(code_lines, sources.values())),
        "kernel, lines": lines(kernel),
        "tests and benchmarks, lines": lines(paths("tests/*.py", "benchmarks/*.py")),
        f"class names that stand twice, of {len(names)}": sum(n > 1 for n in names.values()),
        "accesses to private names of other packages": private_accesses(sources, trees),
        "classes over 300 lines": sum((n.end_lineno or 0) - n.lineno >= 300 for n in classes),
        "functions over a complexity of 10": sum(
            isinstance(node, FUNCTION) and complexity(node) > 10 for node in nodes
        ),
        "files over 400 lines": sum(lines([name]) > 400 for name in product),
        "files that an acquire with an eviction passes": files_of_an_acquire(),
    }
    for what, number in rows.items():
        print(f"{what:48} {number:7,}")  # noqa: T201


if __name__ == "__main__":
    main()
