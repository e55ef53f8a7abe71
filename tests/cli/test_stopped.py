"""No command waits for ever for a stopped daemon: it names the daemon, and a remedy."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import swapd_client
from swapd.cli.run_stages import _up
from swapd.run.daemons import DaemonSpec, ServingDaemon
from swapd.shared import protocol, runtime_dir
from swapd.shared.fds import send_packet
from swapd_client import Timeout, connect_async
from swapd_client.session.lifeline import ANSWER_S
from tests.guarantees.harness import stop_process

from .conftest import Running, environment, swapd

#: Seconds. A stopped daemon never answers; no test asks a running one with this limit.
BRIEF = 0.2


@contextmanager
def stopped(daemon: Running) -> Iterator[None]:
    """The daemon is stopped meanwhile (SIGSTOP)."""
    stop_process(daemon.process.pid)
    try:
        yield
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def names_it(text: str, daemon: Running) -> bool:
    pid = daemon.process.pid
    return (
        f"the daemon at {daemon.folder} (process {pid}) does not answer: it is stopped" in text
        and f"kill -CONT {pid}" in text
    )


@pytest.mark.parametrize(
    "words",
    [
        "status",
        "status --json",
        "log",
        "log --follow",
        "log a",
        "resize a auto",
        "plan",
        "forecast a",
    ],
)
def test_a_command_says_that_the_daemon_is_stopped(daemon: Running, words: str) -> None:
    with stopped(daemon):
        asked = swapd(*words.split(), "-e", daemon.folder, "--timeout", BRIEF, status=1)
    assert asked.stdout == ""
    assert names_it(asked.stderr, daemon)
    assert len(asked.stderr.splitlines()) == 1


def test_doctor_finds_that_the_daemon_is_stopped(daemon: Running) -> None:
    with stopped(daemon):
        found = swapd("doctor", "-e", daemon.folder, "--timeout", BRIEF, status=1)
    text = found.stdout
    assert f"(process {daemon.process.pid}) does not answer: it is stopped" in text
    assert f"kill -CONT {daemon.process.pid}" in text


def test_a_plan_that_needs_no_daemon_is_made_without_it(daemon: Running) -> None:
    words = ["plan", "a=1GiB", "--device-memory", "40GiB", "--timeout", str(BRIEF)]
    with stopped(daemon):
        planned = swapd(*words, env=environment(SWAPD_ENDPOINT=str(daemon.folder)))
    assert "everything fits" in planned.stdout
    assert names_it(planned.stderr, daemon)
    assert "Planned without it" in planned.stderr


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf"])
def test_what_is_no_timeout_is_refused(given: str) -> None:
    refused = swapd("status", f"--timeout={given}", status=2)
    assert "is not a waiting time" in refused.stderr


def test_one_that_is_only_busy_is_said_to_be_so(folder: Path) -> None:
    """The busy one is this process, which listens and never answers."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy:
        busy.bind(str(folder / runtime_dir.LIFELINE))
        busy.listen()
        asked = swapd("status", "-e", folder, "--timeout", BRIEF, status=1)
    assert f"(process {os.getpid()}) does not answer within {BRIEF:g} s: it is busy" in asked.stderr


# --- the library -------------------------------------------------------------------------


def test_connecting_to_a_stopped_daemon_ends(daemon: Running) -> None:
    with stopped(daemon), pytest.raises(Timeout) as silent:
        swapd_client.connect(daemon.folder, timeout=BRIEF)
    assert names_it(str(silent.value), daemon)
    swapd_client.connect(daemon.folder).close()


async def test_connecting_to_it_ends_also_where_it_is_awaited(daemon: Running) -> None:
    with stopped(daemon), pytest.raises(Timeout):
        await connect_async(daemon.folder, timeout=BRIEF)
    async with await connect_async(daemon.folder) as client:
        await client.status()


def test_connecting_ends_also_where_many_wait_to_be_let_in(daemon: Running) -> None:
    """The kernel refuses connections then; the lock of the folder names the process."""
    with ExitStack() as crowd:
        crowd.enter_context(stopped(daemon))
        while True:
            one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            crowd.enter_context(one)
            one.setblocking(False)
            try:
                one.connect(str(daemon.folder / runtime_dir.LIFELINE))
            except BlockingIOError:
                break
            send_packet(one, protocol.encode(protocol.Hello(protocol.VERSION, "crowd")))
        with pytest.raises(Timeout) as silent:
            swapd_client.connect(daemon.folder, timeout=BRIEF)
    assert names_it(str(silent.value), daemon)


def test_a_question_to_a_stopped_daemon_ends_and_the_session_goes_on(daemon: Running) -> None:
    client = daemon.client("worker", a=1)
    with stopped(daemon):
        with pytest.raises(Timeout) as silent:
            client.status(timeout=BRIEF)
        with pytest.raises(Timeout):
            client.forecast("a", timeout=BRIEF)
        with pytest.raises(Timeout):
            client.resize("a", None, timeout=BRIEF)
    assert names_it(str(silent.value), daemon)
    assert client.status(timeout=60).loads == 0
    with client.acquire("a"):
        assert client.forecast("a", timeout=60).at_once


def test_a_run_soon_goes_on_to_see_signals_and_stages_that_end(daemon: Running) -> None:
    wanted = DaemonSpec("host", 1, "")
    with (
        stopped(daemon),
        _up([ServingDaemon(wanted, daemon.folder, 1, None)], None) as registered,
    ):
        began = time.monotonic()
        assert not registered(["stage"])
        assert time.monotonic() - began < ANSWER_S / 3
