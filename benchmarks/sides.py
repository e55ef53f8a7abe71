"""`python -m benchmarks.sides OLD NEW [--rounds N] [--out FILE]`: `swapd bench` of two checkouts.

Runs both in turn, so that changes of the machine's load affect both, with the Python and the
packages that run this. The table has the medians of each figure and their ratio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from swapd import spawn

#: Figures by name, a value for each round.
Figures = dict[str, list[float]]

#: A checkout's own modules come before any that are installed.
_SOURCES = (".", "client")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sides", description=__doc__)
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is run (3)")
    parser.add_argument("--out", type=Path, help="file for all figures, as JSON")
    given = parser.parse_args()
    sides: dict[str, Figures] = {"old": {}, "new": {}}
    for number in range(given.rounds):
        for name, checkout in (("old", given.old), ("new", given.new)):
            _say(f"round {number + 1} of {given.rounds}: {checkout}", sys.stderr)
            for key, value in figures(run(checkout)).items():
                sides[name].setdefault(key, []).append(value)
    if given.out:
        given.out.write_text(json.dumps(sides, indent=2), encoding="utf-8")
    _say(table(sides["old"], sides["new"]))
    return 0


def run(checkout: Path) -> dict[str, Any]:
    """The output of `swapd bench --json` of a checkout. Raises: CalledProcessError with its output.

    Ignores the exit code, which depends on its bounds.
    """
    paths = os.pathsep.join(str((checkout / source).resolve()) for source in _SOURCES)
    done = subprocess.run(
        [sys.executable, "-m", "swapd", "bench", "--json"],
        cwd=checkout,
        env={**spawn.environment(), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        raise subprocess.CalledProcessError(done.returncode, done.args, stderr=done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def figures(report: dict[str, Any]) -> dict[str, float]:
    """Figures of the report's first level; those of the core in passes of the plain loop too, if
    known.
    """
    found = {
        key: float(value)
        for key, value in report.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    for key in ("handle", "handle_busy"):
        handle = report["raw"][key]
        if handle.get("loop_us"):
            found[f"{key}_passes"] = handle["mean_us"] / handle["loop_us"]
    return found


def table(old: Figures, new: Figures) -> str:
    """Markdown: the median of each side, its least and most, and the second over the first."""
    lines = ["| figure | old | new | new over old |", "| --- | --- | --- | --- |"]
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        ratio = ""
        if before and after and statistics.median(before):
            ratio = f"{statistics.median(after) / statistics.median(before):.2f}"
        lines.append(f"| {key} | {_spread(before)} | {_spread(after)} | {ratio} |")
    return "\n".join(lines)


def _spread(values: list[float] | None) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def _say(text: str, stream: Any = sys.stdout) -> None:
    stream.write(text + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
