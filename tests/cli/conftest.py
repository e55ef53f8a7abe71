"""Runs the command line as its users do: real processes, a real daemon, a real terminal."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import swapd_client
from swapd import spawn
from tests import forked
from tests.contents import bytes_of

MIB = 1 << 20
_ROOT = Path(__file__).parents[2]
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def environment(**extra: str) -> dict[str, str]:
    return {**spawn.environment(), "PYTHONPATH": f"{_ROOT}:{_ROOT / 'client'}", **extra}


def start(*words: object, **options: Any) -> "subprocess.Popen[str]":
    """Start `swapd *words`; the processes that `swapd run` starts are forked, too."""
    command = [sys.executable, "-m", "swapd", *map(str, words)]
    options = {"everywhere": words[0] == "run", **options}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return forked.Popen(command, text=True, **{"env": environment(), **options})


def swapd(*words: object, status: int = 0, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run `swapd *words` to its end; it must exit with `status`."""
    process = start(*words, **options)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, f"exit {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def log_of_turns(folder: Path) -> Path:
    """The log of a daemon on which three components took turns, two of them at a time."""
    daemon = serve(folder, eviction="lru")
    client = daemon.client("worker", a=6, b=6, c=6)
    for name in "abc" * 6:
        client.acquire(name).release()
    client.close()
    daemon.stop()
    return daemon.swap_log


def on_terminal(*words: object) -> str:
    """The output of `swapd *words` on a terminal of 120 columns, without its colours."""
    leader, follower = pty.openpty()
    os.set_blocking(leader, True)
    termios.tcsetwinsize(leader, (40, 120))
    # a new process: rich decides at import how to print
    process = subprocess.Popen(
        [sys.executable, "-m", "swapd", *map(str, words)],
        env=environment(COLUMNS="120", TERM="xterm-256color"),
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    shown = bytearray()
    while data := _read(leader):
        shown += data
    os.close(leader)
    assert process.wait(60) == 0, shown.decode()
    assert b"\x1b[" in shown, "no colours on a terminal"
    return _ESCAPES.sub("", shown.decode()).replace("\r\n", "\n")


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # EIO: the last process has left the terminal
        return b""


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@dataclass
class Running:
    """A daemon in a folder of its own."""

    folder: Path
    process: "subprocess.Popen[str]"
    clients: list[swapd_client.Client] = field(default_factory=list)

    @property
    def swap_log(self) -> Path:
        return self.folder / "swap-log.jsonl"

    def client(self, label: str, **sizes_mib: int) -> swapd_client.Client:
        """Open a session that has registered components of these sizes."""
        client = swapd_client.connect(self.folder, label=label)
        self.clients.append(client)
        for name, mib in sizes_mib.items():
            client.register(name, {"w": bytes_of(name, mib * MIB)})
        return client

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the daemon, and wait for that: then the swap log is complete."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.communicate(timeout=60)


def serve(folder: Path, **settings: object) -> Running:
    words: Mapping[str, object] = {"runtime-dir": folder, "budget": "16MiB", **settings}
    flags = [word for name, value in words.items() for word in (f"--{name}", value)]
    return served(folder, start("serve", *flags))


def served(folder: Path, process: "subprocess.Popen[str]") -> Running:
    """The daemon that `process` becomes, once it serves."""
    assert process.stdout is not None
    if not process.stdout.readline():
        raise AssertionError(process.communicate(timeout=60)[1])
    return Running(folder, process)


@contextmanager
def ended(running: Running) -> Iterator[Running]:
    """A daemon that ends with the block, and whose clients are closed before."""
    try:
        yield running
        for client in running.clients:
            client.close()
    finally:
        running.stop()


@pytest.fixture
def daemon(folder: Path) -> Iterator[Running]:
    """A daemon with a budget of 16 MiB, which ends with the test."""
    with ended(serve(folder)) as running:
        yield running
