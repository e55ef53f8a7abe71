"""`python -m benchmarks.stream [--rate N] [--readers N] [--seconds S] [--out FILE]`.

All readers but one read at the given rate; that one is stopped. Judged: the others lose nothing,
the stopped one gets the number of all records that it missed, and the daemon's backlog for it is
bounded.
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.stream.reader import Read
from benchmarks.stream.writer import Took
from swapd.daemon.publisher import BACKLOG_MAX, BACKLOG_MAX_BYTES
from swapd.log.swap_log import QUEUE_MAX_BYTES

MIB = 1 << 20
#: Memory of a Python with all imports of a daemon, before it keeps anything.
BARE_BYTES = 160 * MIB


def main() -> int:
    arguments = _arguments()
    if arguments.rate * arguments.seconds < 2 * BACKLOG_MAX:
        print(f"nobody misses anything: make it {2 * BACKLOG_MAX:,} records at least")  # noqa: T201
        return 2
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        took, readers = measure(Path(folder), arguments.rate, arguments.readers, arguments.seconds)
    *reading, stopped = readers
    lost = sum(each.told_missed + each.untold for each in reading)
    rows = {
        f"records that {len(reading)} readers lost": (lost, 0),
        "records that the stopped one missed and was not told of": (stopped.untold, 0),
        "peak of the writer, MiB": (
            took.peak_bytes // MIB,
            (BARE_BYTES + BACKLOG_MAX_BYTES + QUEUE_MAX_BYTES) // MIB,
        ),
    }
    rate = took.records / took.wall_s
    print(f"{took.records:,} records, {rate:,.0f} a second; load {load:.1f}")  # noqa: T201
    print(f"{took.cpu_s / took.wall_s:.2f} CPUs; longest wait {took.late_s * 1e3:.0f} ms")  # noqa: T201
    print(f"the stopped one was told that it missed {stopped.told_missed:,}\n")  # noqa: T201
    for name, (figure, bound) in rows.items():
        print(f"{'ok  ' if figure <= bound else 'OVER'} {name}: {figure:,} (at most {bound:,})")  # noqa: T201
    if arguments.out is not None:
        report = {
            "date": datetime.date.today().isoformat(),
            "load": load,
            "writer": msgspec.to_builtins(took),
            "readers": msgspec.to_builtins(readers),
            "judged": {name: list(pair) for name, pair in rows.items()},
        }
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(figure > bound for figure, bound in rows.values()))


def measure(folder: Path, rate: int, readers: int, seconds: float) -> tuple[Took, list[Read]]:
    """Cost of the writer, and records of each reader; the last one was stopped meanwhile."""
    writer = _started("writer", str(folder), str(rate), str(seconds))
    reading = [_started("reader", f"ipc://{folder}/events.sock") for _ in range(readers)]
    try:
        _line(writer)
        _tell(writer)
        for each in reading:
            _line(each)
        reading[-1].send_signal(signal.SIGSTOP)
        _line(writer)
        reading[-1].send_signal(signal.SIGCONT)
        _line(reading[-1])
        _tell(writer)
        found = [msgspec.json.decode(_line(each), type=Read) for each in reading]
        _tell(writer)
        return msgspec.json.decode(_line(writer), type=Took), found
    finally:
        for each in (writer, *reading):
            each.kill()
            each.communicate()


def _started(module: str, *words: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", f"benchmarks.stream.{module}", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _line(process: Any) -> bytes:
    line: bytes = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended")
    return line


def _tell(process: Any) -> None:
    process.stdin.write(b"\n")
    process.stdin.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
