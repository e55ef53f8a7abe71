"""`swapd stop` returns when the daemon has ended, or says why it runs on."""

import os
import pty
import signal
import subprocess

import pytest

from swapd.cli.daemons import _open_sessions
from swapd.shared.protocol import SessionStatus
from swapd_client import NotRunning

from .conftest import Running, start, swapd
from .test_status import _reply
from .test_stopped import stopped


def test_it_returns_when_the_daemon_has_ended(daemon: Running) -> None:
    done = swapd("stop", "-e", daemon.folder)
    assert done.stdout == f"stopped: {daemon.folder} (process {daemon.process.pid})\n"
    assert daemon.process.wait(0) == 0
    assert daemon.process.stderr is not None
    assert daemon.process.stderr.read() == ""


def test_it_waits_for_leases_unless_it_is_to_be_now(daemon: Running) -> None:
    client = daemon.client("worker", thinker=4)
    with client.acquire("thinker"):
        said = swapd("stop", "-e", daemon.folder, "--timeout", 0.1, status=1).stderr
        assert "has not ended in 0.1 s: leases are held" in said
        assert "swapd stop --now" in said
        swapd("stop", "-e", daemon.folder, "--now")
        assert daemon.process.wait(0) == 0
    with pytest.raises(NotRunning):
        client.acquire("thinker", timeout=0)


def test_a_daemon_that_is_stopped_is_named_with_what_to_do(daemon: Running) -> None:
    with stopped(daemon):
        said = swapd("stop", "-e", daemon.folder, status=1).stderr
    assert f"kill -CONT {daemon.process.pid}" in said


def test_on_a_terminal_it_asks_before_it_ends_sessions(daemon: Running) -> None:
    daemon.client("worker", thinker=4)
    leader, follower = pty.openpty()
    process = start("stop", "-e", daemon.folder, stdin=follower)
    os.write(leader, b"n\n")
    _, said = process.communicate(timeout=60)
    os.close(leader)
    os.close(follower)
    assert process.returncode == 1
    assert "worker: 1 open session, 0 leases held, 0 waiting. Stop the daemon? [y/N]" in said
    assert daemon.process.poll() is None


def asked(daemon: Running) -> "tuple[subprocess.Popen[str], int]":
    """A stop that waits for an answer, and its terminal, which the caller closes."""
    daemon.client("worker", thinker=4)
    leader, follower = pty.openpty()
    process = start("stop", "-e", daemon.folder, stdin=follower, start_new_session=True)
    os.close(follower)
    assert process.stderr is not None
    assert process.stderr.read(len("worker: ")) == "worker: "
    return process, leader


def test_a_daemon_that_ended_while_it_asked_has_stopped(daemon: Running) -> None:
    process, leader = asked(daemon)
    daemon.stop()
    os.write(leader, b"y\n")
    said, _ = process.communicate(timeout=60)
    os.close(leader)
    assert (process.returncode, said[:9]) == (0, "stopped: ")


def test_ctrl_c_while_it_asks_ends_it_as_it_ends_any_command(daemon: Running) -> None:
    process, leader = asked(daemon)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    os.close(leader)
    assert process.returncode == 130
    assert daemon.process.poll() is None


def test_without_sessions_there_is_nothing_to_ask() -> None:
    assert _open_sessions(_reply(sessions=(SessionStatus(1, "swapd stop", 0, 0),))) == ""
