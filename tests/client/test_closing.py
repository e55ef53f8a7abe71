"""Closing a client while its threads use it ends every wait, and not the process."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import swapd_client
from swapd import spawn
from swapd_client import Client, ClientClosed, SessionFenced

PATIENCE_S = 60
ROUNDS = 40


@pytest.fixture
def folder() -> Iterator[Path]:
    with spawn.daemon(budget="64MiB") as daemon:
        yield daemon.folder


def test_a_component_that_leaves_as_the_daemon_ends_the_session_is_no_obstacle(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = swapd_client.connect(folder)
    left, stays = bytearray(b"left"), bytearray(b"stays")
    views = [client.register(name, {"x": x}).view("x") for name, x in (("a", left), ("b", stays))]
    session = client.session
    before = session.registry.all()
    client.unregister("a")
    monkeypatch.setattr(session.registry, "all", lambda: before)  # as another thread has read it
    session._cut_off(SessionFenced("injected"))
    assert isinstance(session.error, SessionFenced)
    monkeypatch.undo()
    client.close()
    assert [bytes(view) for view in views] == [left, stays]


class Threads:
    """Threads of one client. Each ends with the error that it got."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.told: list[ClientClosed] = []

    def start(self, call: Callable[[], object], count: int) -> None:
        def run() -> None:
            try:
                call()
            except ClientClosed as exc:
                self.told.append(exc)

        for _ in range(count):
            self._threads.append(threading.Thread(target=run, daemon=True))
            self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def ask_for_ever(client: Client) -> None:
    while True:
        client.status()


def ask_from_new_threads(client: Client) -> None:
    """Each thread makes one request, so that sockets come and go."""
    while True:
        once = Threads()
        once.start(client.status, 2)
        once.join()
        if once.told:
            raise once.told[0]


def test_threads_that_wait_are_told_when_two_others_close(folder: Path) -> None:
    for _ in range(ROUNDS):
        client, threads = swapd_client.connect(folder), Threads()
        threads.start(lambda c=client: c.acquire("never", await_registration=True), 4)  # type: ignore[misc]
        while client.status().sessions[-1].waiting < 4:
            pass
        threads.start(client.close, 2)
        threads.join()
        assert len(threads.told) == 4


def test_threads_that_ask_on_and_on_are_told_when_two_others_close(folder: Path) -> None:
    for _ in range(ROUNDS):
        client, threads = swapd_client.connect(folder), Threads()
        threads.start(lambda c=client: ask_for_ever(c), 2)  # type: ignore[misc]
        threads.start(lambda c=client: ask_from_new_threads(c), 1)  # type: ignore[misc]
        client.status()
        threads.start(client.close, 2)
        threads.join()
        assert len(threads.told) == 3


CLOSED_BY_SIGNAL = Path(__file__).parent / "programs" / "closed_by_signal.py"


def test_a_signal_handler_may_close_what_it_interrupts(folder: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, str(CLOSED_BY_SIGNAL), folder], stdout=subprocess.PIPE, text=True
    )
    with child, swapd_client.connect(folder) as client:
        until = time.monotonic() + PATIENCE_S
        while not any(s.label == "signalled" and s.waiting for s in client.status().sessions):
            assert time.monotonic() < until
        child.send_signal(signal.SIGTERM)
        assert child.communicate(timeout=PATIENCE_S)[0] == "told\n"
        assert child.returncode == 0
