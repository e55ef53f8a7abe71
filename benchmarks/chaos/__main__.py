"""`python -m benchmarks.chaos [--seconds S] [--seed N] [--workers N] [--pause S] [--out FILE]`."""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import msgspec

from benchmarks.chaos import counts, shared
from benchmarks.chaos.counts import Counts
from benchmarks.chaos.worker import PATIENCE_S
from benchmarks.processes import Daemon, Figures, keepers, open_files
from swapd_client import Status, connect

#: Two keep their client through all daemons, and one has an event loop.
PROGRAMS = ("worker", "stayer", "looper", "stayer", "worker")
LOOK_S = 0.05
#: Seconds for which a worker is stopped: less than a daemon waits for its answer.
STOPPED_S = (0.0, 0.5)
WHAT = {
    "kill a worker": 4,
    "stop a worker": 8,
    "kill the daemon": 1,
    "end the daemon": 1,
    "upgrade the daemon": 1,
    "kill the keeper": 1,
}


class Report(msgspec.Struct):
    seed: int
    seconds: float
    workers: int
    done: dict[str, int]
    did: dict[str, int]
    before: Figures
    after: Figures
    faults: list[str]


class Chaos:
    """All processes, and the harm done to them."""

    def __init__(self, folder: Path, seed: int, workers: int, pause_s: float) -> None:
        """`pause_s`: the most seconds between two acts."""
        self.folder, self.random, self._pause_s = folder, random.Random(seed), pause_s
        self.did: Counter[str] = Counter()
        self.faults: list[str] = []
        shared.write(folder)
        self.daemon = self._new_daemon()
        self.before = self.daemon.figures()
        self.workers = {f"w{i}": self._new_worker(i) for i in range(workers)}

    def _new_daemon(self) -> Daemon:
        """The next daemon: the other isolation, another budget, sometimes as slow as a bus."""
        settings: dict[str, object] = {
            "isolation": ("strict", "relaxed")[self.did["daemons"] % 2],
            "budget": self.random.choice(("14MiB", "20MiB", "32MiB")),
            "keep_host": "16MiB",
            "residency_bound": self.random.choice((0, 0.05)),
        }
        if self.random.random() < 0.5:
            settings["bandwidth"] = "2GB/s"
        self.did["daemons"] += 1
        return Daemon(self.folder / "d", self.folder / "said", **settings)

    def _new_worker(self, number: int) -> "subprocess.Popen[bytes]":
        self.did["workers"] += 1
        program = f"benchmarks.chaos.{PROGRAMS[number % len(PROGRAMS)]}"
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            program,
            str(self.daemon.folder),
            str(self.folder),
        ]
        command += [f"w{number}", str(self.random.getrandbits(60))]
        with (self.folder / f"w{number}.said").open("ab") as said:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=said)

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.faults:
            time.sleep(self.random.uniform(self._pause_s / 10, self._pause_s))
            self._look()
            self._do(self.random.choices(list(WHAT), list(WHAT.values()))[0])

    def _look(self) -> None:
        """Note processes that have ended without being killed."""
        self._look_at_faults()
        for name, process in self.workers.items():
            if process.poll() is not None:
                said = (self.folder / f"{name}.said").read_text()[-3000:]
                self.faults.append(f"{name} has ended, with {process.returncode}: {said}")

    def _look_at_faults(self) -> None:
        self.faults += self.daemon.problems()
        if (found := self.folder / "faults").exists():
            self.faults += found.read_text().splitlines()

    def _do(self, what: str) -> None:
        self.did[what] += 1
        name = self.random.choice(list(self.workers))
        process = self.workers[name]
        match what:
            case "kill a worker":
                process.kill()
                self._reap(process)
                self.workers[name] = self._new_worker(int(name[1:]))
            case "stop a worker":
                process.send_signal(signal.SIGSTOP)
                time.sleep(self.random.uniform(*STOPPED_S))
                process.send_signal(signal.SIGCONT)
            case "kill the daemon":
                self.daemon.kill()
                self.daemon = self._new_daemon()
            case "upgrade the daemon":
                self.daemon.upgrade()
            case "kill the keeper":
                for pid in keepers(self.daemon.folder):
                    with suppress(ProcessLookupError):  # nothing is kept any more
                        os.kill(pid, signal.SIGKILL)
            case "end the daemon":
                if not self.daemon.stop():
                    self.faults.append("the daemon did not stop when it was told to")
                self.daemon = self._new_daemon()

    def finish(self) -> Figures:
        """End all workers, and count the daemon's resources afterwards."""
        for process in self.workers.values():
            assert process.stdin is not None
            process.stdin.close()
        for name, process in self.workers.items():
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.faults.append(f"endless: {name} does not end: {self._stuck(name, process)}")
                process.kill()
            self._reap(process)
        after = self._settled()
        self._look_at_faults()
        if not self.daemon.stop():
            self.faults.append("the daemon did not stop when it was told to")
        return after

    def _stuck(self, name: str, process: "subprocess.Popen[bytes]") -> str:
        """The stacks of its threads, and what the daemon knows of it."""
        process.send_signal(signal.SIGUSR1)
        with connect(self.daemon.folder, label="observer") as client:
            status = msgspec.json.encode(client.status()).decode()
        stacks = (self.folder / f"{name}.said").read_text()[-8000:]
        return f"{stacks}\n{status}"

    def _settled(self) -> Figures:
        with connect(self.daemon.folder, label="observer") as client:
            until = time.monotonic() + PATIENCE_S
            while (left := _left(client.status())) and time.monotonic() < until:
                client.forget()  # what is kept of the file
                time.sleep(LOOK_S)
        if left:
            self.faults.append(f"left behind: {left}")
        after = self.daemon.figures()
        while after.descriptors > self.before.descriptors and time.monotonic() < until:
            time.sleep(LOOK_S)  # it may not have heard yet that the observer has gone
            after = self.daemon.figures()
        if after.descriptors > self.before.descriptors:
            self.faults.append(f"left behind: {open_files(self.daemon.pid)}")
        return after

    def _reap(self, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _left(status: Status) -> str:
    """What a daemon has beside its observer."""
    sessions = [one for one in status.sessions if one.label != "observer"]
    copies, fenced = status.host_copy_bytes, status.quarantined_bytes
    if not (sessions or status.components or copies or fenced):
        return ""
    names = [c.name for c in status.components]
    return f"{sessions}, {names}, {fenced} bytes fenced off, {copies} bytes of host copies"


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="swapd-chaos-") as folder:
        report = run(Path(folder), arguments)
    print(table(report))  # noqa: T201
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return bool(report.faults)


def run(folder: Path, asked: argparse.Namespace) -> Report:
    began = time.monotonic()
    chaos = Chaos(folder, asked.seed, asked.workers, asked.pause)
    chaos.run(asked.seconds)
    after = chaos.finish()
    done = [Counts(folder, name) for name in chaos.workers]
    return Report(
        asked.seed,
        time.monotonic() - began,
        asked.workers,
        {name: sum(one.get(name) for one in done) for name in counts.NAMES},
        dict(chaos.did),
        chaos.before,
        after,
        list(dict.fromkeys(chaos.faults)),
    )


def table(report: Report) -> str:
    lines = [f"{report.seconds:.0f} s, seed {report.seed}, {report.workers} workers at once", ""]
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {name} | {count:,} |" for name, count in (report.did | report.done).items()]
    lines += ["", f"the daemon before: {report.before}; after: {report.after}"]
    kinds = Counter(fault.partition(":")[0] for fault in report.faults)
    lines += [
        "",
        ", ".join(f"{kinds[kind]} {kind}" for kind in ("wrong bytes", "endless", "refused")),
    ]
    return "\n".join([*lines, *report.faults])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument(
        "--pause", type=float, default=1.0, metavar="S", help="at most, between acts"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
