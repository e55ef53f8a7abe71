"""`python -m benchmarks.gpu_check [--first | --rest | --only NAME ...] [--out FOLDER]`.

Exit codes: 0 all measured bounds and guarantees hold; 1 some do not; 2 invalid arguments; 3 there
is no GPU to check; 4 this Python lacks a package that every section needs.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import plan, runner
from benchmarks.gpu_check.report import Report, line
from benchmarks.gpu_check.rows import Row
from benchmarks.gpu_check.settings import ROOT, SMALL, Settings

NO_GPU = 3
NO_PACKAGE = 4

#: A section does not begin with less time than this.
LEAST_S = 5.0
#: A driver that does not identify its GPU within this time is of no use either.
IDENTIFY_S = 60.0

Heard = Callable[[Row], None]

RESULTS = ROOT / "benchmarks" / "results"


def main() -> int:
    arguments = _arguments()
    try:
        sections = _sections(arguments)
    except ValueError as exc:
        _say(str(exc))
        return 2
    if lacks := plan.missing(plan.CUDA):
        _say(f"gpu-check {plan.lacking(lacks)}")
        return NO_PACKAGE
    machine = _identify(arguments.device)
    if "error" in machine:
        _say(f"No GPU to check: {machine['error']}")
        return NO_GPU
    stub = bool(machine["stub"])
    if stub and not arguments.out:
        _say("This is the stub driver: name a folder with --out; nothing goes to the results.")
        return 2
    settings = replace(SMALL if arguments.small else Settings(), device=arguments.device, stub=stub)
    report = Report(machine, asdict(settings), sections, stub)
    base = _base(arguments.out, machine)
    if arguments.first or arguments.rest:
        kept = report.resume(base)
        _say(f"Kept of an earlier run: {', '.join(kept) or 'nothing'}")
    _say(f"{machine['gpu']}, driver {machine['driver']}, into {base}.json and .md")
    with runner.device_kept_open(machine["uuid"]) as held:
        warm_up(report, base, settings, held)
        run_all(report, base, settings, arguments.limit)
    _say(f"\n{report.summary()}\n{base}.json\n{base}.md")
    return 1 if report.count("failed") else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", default=[], metavar="NAME", help="groups or sections")
    first = f"what decides the design: {', '.join(plan.FIRST)}"
    which.add_argument("--first", action="store_true", help=f"{first}; goes on where it ended")
    which.add_argument("--rest", action="store_true", help="all others; goes on where it ended")
    parser.add_argument("--out", type=Path, help="folder for the files; default: the results")
    parser.add_argument("--limit", type=float, default=480, help="seconds in all (480)")
    parser.add_argument("--device", default="cuda:0", help="which GPU (cuda:0)")
    parser.add_argument("--small", action="store_true", help="tiny sizes: a try, not a result")
    return parser.parse_args()


def _sections(arguments: argparse.Namespace) -> tuple[plan.Section, ...]:
    if arguments.first:
        return plan.first()
    return plan.rest() if arguments.rest else plan.chosen(arguments.only)


def warm_up(report: Report, base: Path, settings: Settings, held: list[str]) -> None:
    """Let torch be read from the disk and the GPU compute, if there is a section to run.

    `held`: the device files that stay open.
    """
    if not report.to_run or plan.missing(plan.WARM.needs):
        return
    _say(f"\n{plan.WARM.title}")
    heard = partial(_heard, report, base)
    name = "device files that stay open, so that the driver stays up between sections"
    heard(Row(plan.WARM.module, name, len(held), note=", ".join(held)))
    _run(report, plan.WARM, settings, plan.WARM.limit_s, heard)


def run_all(report: Report, base: Path, settings: Settings, limit_s: float) -> None:
    """Run the report's sections for `limit_s` seconds at most, and write their rows."""
    until = time.monotonic() + limit_s
    heard = partial(_heard, report, base)
    for section in report.to_run:
        left = until - time.monotonic()
        missing = plan.missing(section.needs)
        _say(f"\n{section.title}")
        if missing:
            heard(_not_run(section, plan.lacking(missing)))
        elif left < LEAST_S:
            heard(_not_run(section, f"the {limit_s:.0f} s of the whole run were over"))
        else:
            _run(report, section, settings, min(section.limit_s, left), heard)
    report.complete = True
    report.write(base)


def _heard(report: Report, base: Path, row: Row) -> None:
    report.rows.append(row)
    report.write(base)
    _say(line(row))


def _run(
    report: Report, section: plan.Section, settings: Settings, limit_s: float, heard: Heard
) -> None:
    ended = runner.run(section, settings, limit_s, heard)
    report.ended.append(ended)
    if ended.how:
        why = f"{ended.how}: {ended.said[-300:]}" if ended.said else ended.how
        heard(Row(section.module, "the section itself", None, verdict="failed", note=why))


def _not_run(section: plan.Section, why: str) -> Row:
    return Row(section.module, "the whole section", None, verdict="missing", note=why)


def _identify(device: str) -> dict[str, Any]:
    """The GPU, identified in another process; `error` is the reason if there is none."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.identify", device]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=runner.environment(),
            capture_output=True,
            text=True,
            timeout=IDENTIFY_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"the driver did not answer within {IDENTIFY_S:.0f} s"}
    try:
        machine: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"error": last}
    return {**machine, "date": datetime.date.today().isoformat()}


def _base(out: Path | None, machine: dict[str, Any]) -> Path:
    """The two files' path, without its ending."""
    folder = out.absolute() if out else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
    return folder / f"{name}-{machine['date']}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        os._exit(130)
