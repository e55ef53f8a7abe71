"""Runs one section in a process of its own, and reads its rows until it ends or is ended.

Meanwhile the GPU's device file stays open, so that the driver keeps the GPU initialised between
sections. If no process has it open, the driver shuts the GPU down, and takes a second or more to
start it again. This changes no setting.

Stdlib only: it must work if everything else is missing or broken.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu_check.plan import Section
from benchmarks.gpu_check.rows import Row
from benchmarks.gpu_check.settings import ROOT, Settings

#: Seconds that a killed process may take to end: the driver frees its memory meanwhile.
BURIAL_S = 15.0
#: Characters kept of a section's output.
TAIL_CHARS = 2000


@dataclass(frozen=True)
class Ended:
    """How a section ended: "" if well. `said` is the end of its output."""

    module: str
    seconds: float
    how: str
    said: str


def environment() -> dict[str, str]:
    """This process's environment, with this tree's packages found first."""
    paths = [str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]  # noqa: TID251
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SWAPD_")}  # noqa: TID251
    return {**inherited, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def run(
    section: Section, settings: Settings, limit_s: float, heard: Callable[[Row], None]
) -> Ended:
    """Run `section` for `limit_s` seconds at most, and end all its processes."""
    started = time.monotonic()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        command = [sys.executable, "-m", "benchmarks.gpu_check.section", section.module]
        process = subprocess.Popen(
            [*command, settings.encode(), str(writing)],
            cwd=ROOT,
            env=environment(),
            pass_fds=(writing,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(writing)
        try:
            in_time = _listen(process.pid, reading, started + limit_s, heard)
        finally:
            os.close(reading)
            code = _bury(process)
        return Ended(
            section.module, time.monotonic() - started, _how(code, limit_s, in_time), _tail(log)
        )


def _listen(pid: int, reading: int, until: float, heard: Callable[[Row], None]) -> bool:
    """Pass rows on until the process has ended (True) or the time is over (False)."""
    ended = os.pidfd_open(pid)
    os.set_blocking(reading, False)
    rest = b""
    try:
        while True:
            left = until - time.monotonic()
            ready, _, _ = select.select([reading, ended], [], [], max(left, 0))
            data = _read(reading)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                heard(Row(**json.loads(line)))
            if data:
                continue
            if ended in ready:
                return True
            if left <= 0:
                return False
            if reading in ready:  # it has closed its end, and will exit
                select.select([ended], [], [], max(left, 0))
    finally:
        os.close(ended)


def _read(reading: int) -> bytes:
    try:
        return os.read(reading, 1 << 16)
    except BlockingIOError:
        return b""


def _bury(process: "subprocess.Popen[bytes]") -> int | None:
    """End all running processes of the section; return its exit code, None if it does not end."""
    # before the wait: until then no other group can have its number
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(BURIAL_S)
    except subprocess.TimeoutExpired:
        return None


def _how(code: int | None, limit_s: float, in_time: bool) -> str:
    if code is None:
        return "hangs in the driver, and cannot be killed"
    if not in_time:
        return f"did not end within {limit_s:.0f} s"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-TAIL_CHARS:].strip()


PROC = Path("/proc/driver/nvidia/gpus")
DEV = Path("/dev")


@contextmanager
def device_kept_open(uuid: str, proc: Path = PROC, dev: Path = DEV) -> Iterator[list[str]]:
    """In the block, the files of the GPU `uuid` are open; yields them, or [] if none can be opened.

    These are all GPUs' files if the driver does not tell which file is whose. Processes started in
    the block do not inherit them.
    """
    found = _file_of(uuid, proc, dev) or sorted(dev.glob("nvidia[0-9]*"))
    held: dict[str, int] = {}
    for path in found:
        with suppress(OSError):
            held[str(path)] = os.open(path, os.O_RDWR)
    try:
        yield list(held)
    finally:
        for fd in held.values():
            os.close(fd)


def _file_of(uuid: str, proc: Path, dev: Path) -> list[Path]:
    for path in proc.glob("*/information"):
        with suppress(OSError):
            said = path.read_text(encoding="utf-8")
            minor = re.search(r"^Device Minor:\s*(\d+)", said, re.MULTILINE)
            if uuid in said and minor:
                return [dev / f"nvidia{minor[1]}"]
    return []
