"""The system's answers about a process. A process that nobody can query has not ended."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from swapd.shared.config import NOTIFY_VARIABLE
from swapd.shared.system import has_ended, is_alive, notify_systemd, open_pidfd
from tests.processes import line_of


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))


def test_a_process_is_alive_until_it_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert is_alive(process.pid)
        assert not has_ended(process.pid)
        process.kill()
        process.wait()
        assert not is_alive(process.pid)
        assert has_ended(process.pid)
        assert open_pidfd(process.pid) is None


@pytest.mark.parametrize(("owner", "verb"), [(os, "pidfd_open"), (Path, "read_bytes")])
def test_without_descriptors_a_process_that_lives_is_not_taken_as_gone(
    monkeypatch: pytest.MonkeyPatch, owner: object, verb: str
) -> None:
    """Otherwise others would get its memory while it can still write to it."""
    monkeypatch.setattr(owner, verb, refuse)
    assert is_alive(os.getpid())
    assert not has_ended(os.getpid())


def test_without_descriptors_systemd_hears_nothing_and_the_watchdog_s_next_beat_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(NOTIFY_VARIABLE, "/somewhere")
    monkeypatch.setattr(socket, "socket", refuse)
    notify_systemd("WATCHDOG=1")
    assert f"cannot tell systemd WATCHDOG=1: {os.strerror(errno.ENFILE)}" in caplog.text


def test_a_process_whose_first_thread_has_ended_has_not_while_another_goes_on() -> None:
    """The system reports no memory for it, and yet it may write to its memory."""
    program = """
import ctypes, platform, sys, threading
def go_on():
    while open("/proc/self/statm").read().split()[0] != "0":
        pass
    print("alone", flush=True)
    sys.stdin.read()
threading.Thread(target=go_on).start()
# of this thread alone: exit, not exit_group
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert line_of(process) == b"alone\n"
        assert Path(f"/proc/{process.pid}/statm").read_bytes().split()[0] == b"0"
        assert not has_ended(process.pid)
        process.kill()
        process.wait()
        assert has_ended(process.pid)
