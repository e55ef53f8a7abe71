"""`python -m benchmarks.scale [--rounds N] [--only core|daemon] [--out FILE]`."""

import argparse
import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.scale import core, daemon
from swapd.shared.units import seconds

CASES = [(1_000, 0), (1_000, 2_000), (10_000, 0), (10_000, 2_000)]
#: Bounds: times of the core's events, as multiples; and waits of others, in seconds.
MOST_RATIO = 10.0
MOST_WAIT_S = 0.05


def main() -> int:
    arguments = _arguments()
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    if arguments.only != "daemon":
        report["core"] = _core(arguments.rounds)
    if arguments.only != "core":
        waits = daemon.measure(arguments.sessions, arguments.owned, arguments.large << 20)
        report["daemon"] = [msgspec.to_builtins(wait) for wait in waits]
        print(_waits(waits, arguments))  # noqa: T201
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _core(rounds: int) -> dict[str, Any]:
    found = core.measure(CASES, rounds)
    ratios = core.ratios(found)
    print(_table(found, ratios))  # noqa: T201
    return {
        f"{components} components, {waiters} waiters": {
            kind: {"us": times[kind] * 1e6, "ratio": ratios[kind][components, waiters]}
            for kind in sorted(times)
        }
        for (components, waiters), times in found.items()
    }


def _table(
    found: dict[core.Case, dict[str, float]], ratios: dict[str, dict[core.Case, float]]
) -> str:
    head = " | ".join(f"{n:,} and {w:,}" for n, w in CASES)
    lines = [
        f"| event, median; components and waiters | 10 and 0 | {head} |",
        f"| --- | --- |{' --- |' * len(CASES)}",
    ]
    for kind, row in ratios.items():
        few = found[core.FEW].get(kind)
        cells = [kind, seconds(few) if few is not None else ""]
        cells += [f"{row[case]:.1f}" if case in row else "" for case in CASES]
        lines.append(f"| {' | '.join(cells)} |")
    worst = max((row[case], kind) for kind, row in ratios.items() for case in row)
    verdict = "ok" if worst[0] <= MOST_RATIO else "FAILED"
    return "\n".join(
        [*lines, f"\nthe most: {worst[0]:.1f} ({worst[1]}), bound {MOST_RATIO:g}: {verdict}"]
    )


def _waits(waits: list[daemon.Wait], arguments: argparse.Namespace) -> str:
    lines = [
        f"{arguments.sessions} sessions with {arguments.owned:,} components each; "
        f"{arguments.large} MiB registered beside",
        "",
        "| an honest session waits for; median, 99 in 100, the most | alone "
        "| beside a similar process without swapd | beside others "
        f"| the most: bound {seconds(MOST_WAIT_S)} more |",
        "| --- | --- | --- | --- | --- |",
    ]
    for wait in waits:
        columns = (wait.alone_s, wait.machine_s or (), wait.beside_s)
        times = (", ".join(map(seconds, column)) for column in columns)
        fits = wait.beside_s[-1] <= wait.alone_s[-1] + MOST_WAIT_S
        cells = [wait.what, *times, "ok" if fits else "FAILED"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.machine()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("--rounds", type=int, default=50, help="of everything, in each case")
    parser.add_argument("--only", choices=["core", "daemon"])
    parser.add_argument("--sessions", type=int, default=3, help="that have much")
    parser.add_argument("--owned", type=int, default=3_300, help="components of each")
    parser.add_argument("--large", type=int, default=2048, metavar="MIB", help="registered beside")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
