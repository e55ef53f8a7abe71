"""Promises of the composition root: readiness, modes, and a clean end."""

import os
import pty
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import swapd_client
from swapd import spawn
from swapd.core.events import RulesChanged
from swapd.log.reader import read
from swapd.log.replay import replay
from swapd.shared import protocol, runtime_dir
from swapd.shared.config import watchdog_s
from swapd.web.serving import LABEL
from tests import forked
from tests.files import file_with
from tests.guarantees.harness import RawSession
from tests.processes import PYTHONPATH, line_of

SERVE = (sys.executable, "-m", "swapd", "serve")


def test_systemd_hears_when_it_is_ready_and_when_it_stops(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(30)
        with subprocess.Popen(
            [*SERVE, "--budget", "8MiB", "--runtime-dir", str(tmp_path / "run")],
            env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "PYTHONPATH": PYTHONPATH},
            stdout=subprocess.PIPE,
        ) as process:
            try:
                assert notify.recv(100) == b"READY=1"
                # the sockets exist as soon as it is ready
                for name in (runtime_dir.LIFELINE, runtime_dir.RPC, runtime_dir.EVENTS):
                    assert (tmp_path / "run" / name).is_socket()
                process.send_signal(signal.SIGTERM)
                assert notify.recv(100) == b"STOPPING=1"
                assert process.wait(30) == 0
            finally:
                process.kill()


def test_only_the_user_can_reach_the_sockets() -> None:
    with spawn.daemon(budget="8MiB") as daemon:
        assert stat.S_IMODE(daemon.folder.stat().st_mode) == 0o700
        for name in (runtime_dir.LIFELINE, runtime_dir.RPC, runtime_dir.EVENTS, runtime_dir.LOCK):
            assert stat.S_IMODE((daemon.folder / name).stat().st_mode) == 0o600, name


def test_a_clean_stop_removes_the_sockets_and_ends_with_success() -> None:
    with spawn.daemon(budget="8MiB") as daemon:
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 0
        for name in (runtime_dir.LIFELINE, runtime_dir.RPC, runtime_dir.EVENTS):
            assert not (daemon.folder / name).exists()


def test_a_budget_that_cannot_be_had_is_refused_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [*SERVE, "--budget", "900TiB", "--runtime-dir", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "lower --budget" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_whose_path_no_socket_can_hold_is_served(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    with (
        spawn.daemon(budget="8MiB", runtime_dir=folder),
        swapd_client.connect(folder) as client,
    ):
        client.register("a", {"w": bytearray(4096)})
        with client.acquire("a"):
            assert client.status().runtime_dir == str(folder)


def test_a_folder_behind_links_of_root_s_is_served(tmp_path: Path) -> None:
    """As /var/run is a link to /run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "run").symlink_to("../run")
    with spawn.daemon(budget="8MiB", runtime_dir=tmp_path / "var" / "run" / "swapd"):
        for way in ("run", "var/run"):
            swapd_client.connect(tmp_path / way / "swapd").close()


def test_a_log_in_the_folder_is_no_link_to_another_file(tmp_path: Path) -> None:
    victim = file_with(tmp_path / "victim", "precious\n")
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    (folder / runtime_dir.SWAP_LOG).symlink_to(victim)
    with spawn.daemon(budget="8MiB", runtime_dir=folder):
        swapd_client.connect(folder).close()
    assert victim.read_text() == "precious\n"


def test_a_daemon_whose_stderr_nobody_reads_serves_on_and_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # without it, its stream has a lock
    with spawn.daemon(budget="8MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        with RawSession(daemon.folder) as raw:
            for _ in range(3000):  # each causes a line of the log
                raw.rpc.send(b"garbage")
            for _ in range(3000):
                assert isinstance(raw.answer(), protocol.Refused)
        client.status()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 0


def test_a_watchdog_hears_of_the_loop_until_the_end(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(30)
        heard = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "20000"}
        with spawn_with(tmp_path, **heard) as process:
            said = {notify.recv(100) for _ in range(4)}
            assert said == {b"READY=1", b"WATCHDOG=1"}
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def test_a_watchdog_of_another_process_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    assert watchdog_s() == 30.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_s() is None


@contextmanager
def spawn_with(folder: Path, *words: object, **env: str) -> Iterator["subprocess.Popen[str]"]:
    with forked.Popen(
        [*SERVE, "--budget", "8MiB", "--runtime-dir", str(folder / "run"), *map(str, words)],
        env={"PYTHONPATH": PYTHONPATH, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_sighup_changes_what_can_be_changed_and_names_what_cannot(tmp_path: Path) -> None:
    file = tmp_path / "swapd.toml"
    file.write_text(
        'stop_timeout = 10\npatience = 30\nswap_log_size = "1GB"\nhost_memory = "1GB"\n'
        'chunk = "2MiB"\n'
    )
    with spawn_with(tmp_path, "--config", file) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        file.write_text(
            'stop_timeout = 0.5\npatience = 5\novertake = 3\novertake_of = "a=1"\n'
            'swap_log_size = "2 GB"\nhost_memory = "3MiB"\nchunk = "4MiB"\n'
        )
        process.send_signal(signal.SIGHUP)
        said = process.stderr.readline()
        changed = (
            "host_memory 1 GB -> 3 MiB, patience 30.0 -> 5.0, overtake 16 -> 3, "
            "overtake_of default -> a=1, stop_timeout 10.0 -> 0.5, swap_log_size 1 GB -> 2 GB"
        )
        assert f"reloaded: {changed}" in said
        said = process.stderr.readline()
        assert "not reloaded, restart swapd for it: chunk 2 MiB -> 4 MiB" in said
        file.write_text("stop_timeout = -1\n")
        process.send_signal(signal.SIGHUP)
        said = process.stderr.readline()
        assert "not reloaded, and no setting has changed" in said
        assert "stop_timeout: Expected `float` >= 0.0" in said
        client = swapd_client.connect(tmp_path / "run")
        client.register("a", {"w": bytearray(1 << 20)})
        with pytest.raises(swapd_client.SwapdError, match="limit 3 MiB"):
            client.register("b", {"w": bytearray(4 << 20)})
        with client.acquire("a"):  # held for longer than the daemon's new stop timeout
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        client.close()
        assert "stopping with leases still held" in process.stderr.read()
    steps = list(replay(line.raw for line in read(tmp_path / "run" / "swap-log.jsonl")))
    (changed_to,) = (s.event.patience_s for s in steps if isinstance(s.event, RulesChanged))
    assert changed_to == 5.0
    assert all(step.actions == step.recorded for step in steps), "a log replays by its rules"


def test_a_daemon_says_how_much_it_serves_in_whole_chunks(tmp_path: Path) -> None:
    with spawn_with(tmp_path, "--budget", "7MiB", "--check") as process:
        assert "would serve host, 6 MiB" in line_of(process)
        assert process.wait(30) == 0
    with spawn_with(tmp_path, "--budget", "7MiB") as process:
        assert "serves host: 6 MiB in chunks of 2 MiB" in line_of(process)
        with swapd_client.connect(tmp_path / "run") as client:
            assert client.status().budget_bytes == 6 << 20
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_daemon_that_lingers_ends_after_its_last_session_or_a_new_time(tmp_path: Path) -> None:
    file = file_with(tmp_path / "swapd.toml", "linger = 3600\n")
    with spawn_with(tmp_path, "--config", file) as process:
        assert line_of(process)
        swapd_client.connect(tmp_path / "run").close()
        file.write_text("linger = 0.1\n")
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 0
    with spawn_with(tmp_path, "--linger", 0.2, "--verbose") as process:
        assert line_of(process)
        with swapd_client.connect(tmp_path / "run"):
            with swapd_client.connect(tmp_path / "run") as second:
                assert second.status().sessions
            assert process.poll() is None
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert "no session for 200 ms, as --linger says" in process.stderr.read()


def test_a_daemon_that_lingers_and_is_told_to_stop_is_told_once(tmp_path: Path) -> None:
    with spawn_with(tmp_path, "--linger", 0.01, "--bandwidth", "0.5MB/s") as process:
        assert line_of(process)
        with swapd_client.connect(tmp_path / "run") as client:
            client.register("a", {"w": bytearray(4096)})
            client.register("b", {"w": bytearray(2 << 20)})
            with client.acquire("a"):
                client.prefetch("b")
                process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_its_page_keeps_no_daemon_that_nobody_else_uses(tmp_path: Path) -> None:
    with spawn_with(tmp_path, "--linger", 0.2, "--http", "127.0.0.1:0") as process:
        assert line_of(process)
        with swapd_client.connect(tmp_path / "run") as client:
            while LABEL not in [session.label for session in client.status().sessions]:
                assert process.poll() is None  # its process is still starting
        assert process.wait(30) == 0


def test_a_daemon_whose_terminal_closes_stops(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    with subprocess.Popen(
        ["setsid", "-c", *SERVE, "--budget", "8MiB", "--runtime-dir", str(tmp_path / "run")],
        env={"PYTHONPATH": PYTHONPATH, "PATH": os.defpath},
        stdin=follower,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert line_of(process)
            os.close(follower)
            os.close(leader)
            assert process.wait(30) == 0
        finally:
            process.kill()


BROKEN = """
from swapd.cli import main
from swapd.daemon import statuses
from swapd.device import HostDevice

def fails(*args, **options):
    raise {error}

{verb} = fails
main()
"""


def broken(folder: Path, verb: str, error: str) -> "subprocess.Popen[str]":
    """A daemon in which this function raises this error."""
    program = BROKEN.format(verb=verb, error=error)
    return forked.Popen(
        [sys.executable, "-c", program, "serve", "--budget", "8MiB", "--runtime-dir", str(folder)],
        env={"PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


ENDLESS = """
import asyncio
from swapd.cli import main
from swapd.daemon.host_copies import HostCopies
from swapd.daemon.mover import Mover

def make(*args, **options):
    while True:
        yield

async def finish(self):
    while self._inbox._tasks:
        await asyncio.sleep(0)

HostCopies.make, Mover.finish = make, finish
main()
"""


def test_other_work_does_not_go_on_while_a_stop_saves_bytes(tmp_path: Path) -> None:
    """The last save takes until all other work has ended, and a host copy is made for ever."""
    with forked.Popen(
        [sys.executable, "-c", ENDLESS, "serve", "--budget", "8MiB", "--runtime-dir", tmp_path],
        env={"PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert line_of(process)
            with RawSession(tmp_path) as raw:
                raw.rpc.send(protocol.encode(protocol.Register(raw.next_id(), "a", 4096)))
                assert isinstance(raw.ask(protocol.StatusRequest(raw.next_id())), protocol.Status)
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_bug_ends_the_daemon_with_its_error_and_leaves_no_socket(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with broken(folder, "HostDevice.copy_in", "ZeroDivisionError('a bug')") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        with swapd_client.connect(folder, reconnect=0) as client:
            client.register("a", {"w": bytearray(4096)})
            with pytest.raises(swapd_client.SwapdError):
                client.acquire("a")
        assert process.wait(30) == 1
        assert "ZeroDivisionError: a bug" in process.stderr.read()
        for name in (runtime_dir.LIFELINE, runtime_dir.RPC, runtime_dir.EVENTS):
            assert not (folder / name).exists()


def test_figures_that_cannot_be_read_are_a_note_of_the_status(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with broken(folder, "statuses._private_copies", "OSError(5, 'EIO')") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            with swapd_client.connect(folder) as client:
                for _ in range(2):
                    assert "EIO" in client.status().notes[0]
        finally:
            process.kill()
