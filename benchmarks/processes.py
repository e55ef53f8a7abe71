"""A daemon watched from outside: its resources, and its end. Linux only."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from swapd import spawn
from swapd.shared.runtime_dir import KEEPER

MIB = 1 << 20
#: Seconds after which a daemon that has not stopped counts as hanging.
STOP_S = 60.0


class Figures(msgspec.Struct, frozen=True):
    """Resources of a process."""

    descriptors: int
    threads: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> "Figures":
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return cls(
            len(open_files(pid)),
            int(fields["Threads"]),
            int(fields["RssAnon"].split()[0]) << 10,
        )

    def __str__(self) -> str:
        return (
            f"{self.descriptors} descriptors, {self.threads} threads, "
            f"{self.resident_bytes / MIB:.0f} MiB of its own"
        )


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process are, but for the swap log: it is open only now and then."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed since it was listed
            found.append(os.readlink(fd))
    return sorted(name for name in found if not name.endswith(".jsonl"))


def keepers(folder: Path) -> list[int]:
    """The processes that hold host copies for the daemons of this folder."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            command = (process / "cmdline").read_bytes().split(b"\0")
            if (process / "cwd").samefile(folder) and command[-3:-2] == [KEEPER.encode()]:
                found.append(int(process.name))
    return found


class Daemon:
    """`swapd serve` on the host device, in a folder that outlives it."""

    def __init__(self, folder: Path, said: Path, **settings: object) -> None:
        """Start it; blocks until it serves. `said`: the file to which its stderr is appended."""
        self.folder = folder
        self._said = said
        command = [sys.executable, "-m", "swapd", "serve", "--runtime-dir", str(folder)]
        for name, value in {"device": "host", **settings}.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        with said.open("ab") as stderr:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, env=spawn.environment()
            )
        self._await_greeting()

    def _await_greeting(self) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise RuntimeError(f"the daemon did not start: {self._said.read_text()}")

    @property
    def pid(self) -> int:
        return self.process.pid

    def figures(self) -> Figures:
        return Figures.of(self.pid)

    def problems(self) -> list[str]:
        """Failures of this daemon that no daemon may have."""
        problems = []
        if self.process.poll() is not None:
            problems.append(f"the daemon has ended by itself, with {self.process.returncode}")
        if "Traceback" in (said := self._said.read_text()):
            problems.append(f"the daemon said: {said[said.index('Traceback') :][:4000]}")
        return problems

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self.process.kill()
        self._reap()

    def upgrade(self) -> None:
        """Replace its program by another of this version; returns when that serves."""
        self.process.send_signal(signal.SIGUSR2)
        self._await_greeting()

    def stop(self) -> bool:
        """SIGTERM; returns whether it ended in time. Otherwise it is killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self._reap()
        return True

    def _reap(self) -> None:
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def until_stdin_ends() -> threading.Event:
    """Set once the parent process has closed this process's stdin, or is gone."""
    ended = threading.Event()

    def read() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    return ended
