"""`python -m benchmarks.vllm [--only SECTION ...] [--rounds N] [--requests N] [--out FILE]`."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.vllm import (
    caches,
    larger,
    memory,
    pipeline,
    restart,
    rivals,
    start,
    streaming,
    tax,
    turns,
    window,
)
from benchmarks.vllm.rows import Section, table
from tests.vllm.engines import Nursery
from tests.vllm.environment import environment
from tests.vllm.models import DEEP, HEAVY, LARGE, MODELS, THIRD, WAVE

SECTIONS = (
    *("tax", "turns", "memory", "pipeline", "streaming", "start", "rivals", "window"),
    *("larger", "caches", "restart"),
)


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="swapd-bench-") as folder:
        models = Path(folder)
        names = (*MODELS, *DEEP, *THIRD, *WAVE, *LARGE, *HEAVY)
        command = [sys.executable, "-m", "tests.vllm.models", folder, *names]
        subprocess.run(command, env=environment(), check=True)
        found = _measure(models, arguments)
    print(table(list(found.values())))  # noqa: T201
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0 if all(row.holds for section in found.values() for row in section.rows) else 1


def _measure(models: Path, arguments: argparse.Namespace) -> dict[str, Section]:
    nursery, rounds = Nursery(), arguments.rounds
    measures = {
        "tax": lambda: tax.measure(models, nursery),
        "turns": lambda: turns.measure(models, nursery, arguments.requests),
        "memory": lambda: memory.measure(models, nursery),
        "pipeline": lambda: pipeline.measure(models, nursery, rounds),
        "streaming": lambda: streaming.measure(models, nursery, rounds),
        "start": lambda: start.measure(models, rounds),
        "restart": lambda: restart.measure(models, nursery, rounds),
        "window": lambda: window.measure(models, nursery, rounds),
        "rivals": lambda: rivals.measure(models, nursery, rounds),
        "caches": lambda: caches.measure(nursery, rounds),
        "larger": lambda: larger.measure(models, nursery, arguments.requests),
    }
    try:
        found = {}
        for name in arguments.only:
            print(name, file=sys.stderr)  # noqa: T201
            found[name] = measures[name]()
        return found
    finally:
        nursery.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100, help="to each of `turns` and `larger`")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
