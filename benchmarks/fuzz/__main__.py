"""`python -m benchmarks.fuzz [--frames N] [--seed S] [--out FILE]`: N frames on each socket."""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.fuzz import attack, honest
from benchmarks.processes import MIB, Daemon, Figures
from swapd_client import connect

WORKERS = ("honest-0", "honest-1")
LOOK_S = 0.1
#: Bytes that a daemon's allocator may keep after the first tenth of the frames.
GROWTH_MAX = 24 * MIB


class Report(msgspec.Struct):
    seed: int
    isolation: str
    seconds: float
    sent: dict[str, attack.Sent]
    honest: dict[str, honest.Seen]
    before: Figures
    after: Figures
    problems: list[str]


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="swapd-fuzz-") as folder:
        report = run(Path(folder), arguments.frames, arguments.seed, arguments.isolation)
    print(table(report))  # noqa: T201
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return bool(report.problems)


def run(folder: Path, frames: int, seed: int, isolation: str) -> Report:
    daemon = Daemon(folder / "d", folder / "said", budget="16MiB", isolation=isolation)
    began = time.monotonic()
    problems: list[str] = []
    workers = {name: _start("honest", daemon.folder, name) for name in WORKERS}
    for process in workers.values():
        assert process.stdout is not None
        process.stdout.readline()
    names = [name for worker in WORKERS for name in honest.names_of(worker)]
    _attack(daemon, max(frames // 10, 1), seed, names, problems)  # pools and caches fill once
    before = _settled(daemon, problems, None)
    sent = _attack(daemon, frames, seed + 1, names, problems)
    after = _settled(daemon, problems, before)
    seen = {name: msgspec.json.decode(_ended(p), type=honest.Seen) for name, p in workers.items()}
    for name, one in seen.items():
        if one.wrong or one.endless or one.refusals:
            problems.append(f"{name}: {one}")
    problems += daemon.problems()
    if not daemon.stop():
        problems.append("the daemon did not stop when it was told to")
    if not _is_back(before, after):
        problems.append(f"the daemon had {before}, and has {after}")
    seconds = time.monotonic() - began
    return Report(seed, isolation, seconds, sent, seen, before, after, problems)


def _start(program: str, folder: Path, *arguments: object) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", f"benchmarks.fuzz.{program}", str(folder)]
    return subprocess.Popen(
        command + [str(one) for one in arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def _attack(
    daemon: Daemon, frames: int, seed: int, names: list[str], problems: list[str]
) -> dict[str, attack.Sent]:
    """Attack both sockets at once."""
    running = {
        which: _start("attack", daemon.folder, which, frames, seed, *names)
        for which in ("rpc", "lifeline")
    }
    sent = {}
    for which, process in running.items():
        said = _ended(process)
        if process.returncode:
            problems.append(f"the attack on {which} ended with {process.returncode}")
        sent[which] = msgspec.json.decode(said or b"{}", type=attack.Sent)
    return sent


def _ended(process: "subprocess.Popen[bytes]") -> bytes:
    said, _ = process.communicate()
    return said


def _is_back(before: Figures, now: Figures) -> bool:
    return (
        now.descriptors <= before.descriptors
        and now.threads <= before.threads
        and now.resident_bytes - before.resident_bytes <= GROWTH_MAX
    )


def _settled(daemon: Daemon, problems: list[str], before: Figures | None) -> Figures:
    """The daemon's figures once only the honest workers are left."""
    with connect(daemon.folder, label="observer") as client:
        until = time.monotonic() + honest.PATIENCE_S
        while time.monotonic() < until:
            status, figures = client.status(), daemon.figures()
            there = any(s.label == "fuzz" for s in status.sessions)
            if not there and (before is None or _is_back(before, figures)):
                break
            time.sleep(LOOK_S)
        strange = [c.name for c in status.components if not c.name.startswith(WORKERS)]
        if there or strange or status.quarantined_bytes:
            problems.append(f"left behind: {strange}, {status.quarantined_bytes} bytes fenced off")
    return figures


def table(report: Report) -> str:
    lines = [f"{report.seconds:.0f} s, seed {report.seed}, isolation {report.isolation}", ""]
    lines += [
        "| | frames | sessions | ended by the daemon | answers |",
        "| --- | --- | --- | --- | --- |",
    ]
    for which, sent in report.sent.items():
        lines.append(
            f"| {which} | {sent.frames:,} | {sent.sessions:,} | {sent.ended:,} | {sent.answers:,} |"
        )
    lines += ["", "| beside | acquires | checked | wrong | endless | refused |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for name, seen in report.honest.items():
        lines.append(
            f"| {name} | {seen.acquires:,} | {seen.bytes_checked / MIB:,.0f} MiB | {seen.wrong} | "
            f"{seen.endless} | {len(seen.refusals)} |"
        )
    lines += ["", f"the daemon before: {report.before}; after: {report.after}"]
    lines += ["", *(report.problems or ["no harm was done"])]
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz")
    parser.add_argument("--frames", type=int, default=50_000, help="on each socket")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--isolation", choices=("strict", "relaxed"), default="strict")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
