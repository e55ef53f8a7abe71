"""What the composition root promises: readiness, modes, and a clean end."""

import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import swapd_client
from swapd import spawn
from swapd.shared import protocol, runtime_dir
from tests.guarantees.harness import RawSession
from tests.processes import PYTHONPATH

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
                # ready means ready: the sockets are there
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
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    (folder / runtime_dir.SWAP_LOG).symlink_to(victim)
    with spawn.daemon(budget="8MiB", runtime_dir=folder):
        swapd_client.connect(folder).close()
    assert victim.read_text() == "precious\n"


def test_a_daemon_whose_stderr_nobody_reads_serves_on_and_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # then what it writes has a lock
    with spawn.daemon(budget="8MiB") as daemon, swapd_client.connect(daemon.folder) as client:
        with RawSession(daemon.folder) as raw:
            for _ in range(3000):  # each is worth a line of the log
                raw.rpc.send(b"garbage")
            for _ in range(3000):
                assert isinstance(raw.answer(), protocol.Refused)
        client.status()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 0
