"""`swapd upgrade` puts the installed version in the place of a daemon, and workers see a pause."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch

import swapd_client
from swapd.shared import protocol, runtime_dir
from swapd.shared.runtime_dir import RuntimeDirError
from swapd_client import VersionMismatch
from tests.files import file_with
from tests.processes import line_of, tell

from .conftest import MIB, Running, ended, environment, served, start, swapd


def launched(folder: Path, *words: str) -> Running:
    """A daemon with a command line of its own, as a forked one has not."""
    command = [sys.executable, "-m", "swapd", "serve", "--runtime-dir", str(folder), *words]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True)
    return served(folder, process)


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    return file_with(tmp_path / "swapd.toml", 'device = "host"\nbudget = "16MiB"\n')


@pytest.fixture
def daemon(folder: Path, settings: Path) -> Iterator[Running]:
    with ended(launched(folder, "--config", str(settings))) as running:
        yield running


def test_a_loop_sees_a_pause_and_loses_nothing(daemon: Running, settings: Path) -> None:
    client = daemon.client("worker")
    clean, mutable = torch.arange(MIB, dtype=torch.float32), torch.zeros(MIB)
    expected = clean.clone()
    client.register("clean", {"x": clean})
    client.register("mutable", {"x": mutable}, mutable=True)
    places = [clean.data_ptr(), mutable.data_ptr()]
    over = threading.Event()

    def loop() -> int:
        rounds = 0
        while not over.is_set():
            with client.acquire("mutable"):
                mutable.add_(1)
            with client.acquire("clean"):
                assert torch.equal(clean, expected)
            rounds += 1
        return rounds

    with ThreadPoolExecutor() as pool:
        looping = pool.submit(loop)
        for turn in range(2):
            settings.write_text(f'device = "host"\nbudget = "{20 + turn}MiB"\n')
            said = swapd("upgrade", "-e", daemon.folder).stdout
            assert f"(process {daemon.process.pid}) is swapd {swapd_client.__version__}" in said
        with client.acquire("clean"):
            assert client.status().budget_bytes == 20 * MIB, "a chunk is 2 MiB"
        over.set()
        rounds = looping.result(60)
    with client.acquire("mutable"):
        assert mutable.eq(rounds).all()
    assert [clean.data_ptr(), mutable.data_ptr()] == places


def test_a_lease_is_held_through_it_and_a_waiting_acquire_is_granted(daemon: Running) -> None:
    holder, waiter = daemon.client("holder", thinker=12), daemon.client("waiter", talker=12)
    with ThreadPoolExecutor() as pool, holder.acquire("thinker"):
        waiting = pool.submit(waiter.acquire, "talker")
        while not holder.status().waiting:
            pass
        swapd("upgrade", "-e", daemon.folder)
        waiting.result(60).release()
        holder.session.life.await_end()
    holder.acquire("thinker").release()


def test_nobody_has_to_read_what_the_next_version_says(daemon: Running) -> None:
    """As where the terminal or the `tee` of its start is closed by now."""
    assert daemon.process.stdout is not None
    daemon.process.stdout.close()
    swapd("upgrade", "-e", daemon.folder)
    daemon.client("worker", thinker=4).acquire("thinker").release()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_log_that_is_followed_goes_on(daemon: Running, how: signal.Signals) -> None:
    process = start("log", "-f", "-e", daemon.folder)
    assert process.stdout is not None
    with process:
        while " start " not in line_of(process):
            pass
        swapd("upgrade", "-e", daemon.folder)
        daemon.client("worker", thinker=4).close()
        while "register " not in line_of(process):
            pass
        daemon.stop(how)
        _, err = process.communicate(timeout=60)
    stopped = how == signal.SIGTERM
    assert ("the daemon has stopped, so its log ends here" in err) == stopped
    assert process.returncode == (0 if stopped else 1)


def test_a_run_sums_up_both_daemons(
    folder: Path, settings: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    home = folder / "swapd" / "host"
    home.mkdir(parents=True, mode=0o700)
    home.parent.chmod(0o700)
    use = [sys.executable, str(Path(__file__).parents[1] / "programs" / "uses_swapd.py"), "end"]
    upgrade = [sys.executable, "-m", "swapd", "upgrade"]
    program = f"import subprocess as s\nfor words in {[use, upgrade, use]}: s.check_call(words)"
    with ended(launched(home, "--config", str(settings))):
        done = swapd("run", "--", sys.executable, "-c", program)
    assert "swapd: host: 6 swaps, 72 MiB in and 0 B out; " in done.stderr


def test_what_would_not_serve_is_refused_before_anything_ends(
    daemon: Running, settings: Path
) -> None:
    client = daemon.client("worker", thinker=4)
    for line, why in (
        ('budget = "lots"', "'lots'"),
        ('budget = "1MiB"', "is less than one chunk of 2 MiB"),
        ('chunk = "3MiB"', "use a multiple of 2 MiB"),
        ('device = "cuda:x"', "there is no device 'cuda:x'"),
        ('http = "0.0.0.0:9470"', "so a token is needed"),
    ):
        settings.write_text(line)
        said = swapd("upgrade", "-e", daemon.folder, status=1).stderr
        assert "is not upgraded, and goes on" in said
        assert why in said
    assert client.session.error is None
    client.acquire("thinker").release()


def test_where_its_workers_could_not_join_it_is_refused_before_anything_ends(
    folder: Path, settings: Path, tmp_path: Path
) -> None:
    place = f'runtime_dir = "{folder}"\n'
    settings.write_text(place + 'device = "host"\nbudget = "16MiB"\n')
    command = [sys.executable, "-m", "swapd", "serve", "--config", str(settings)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True)
    with ended(served(folder, process)) as running:
        client = running.client("worker", thinker=4)
        for lines, where in (
            (f'runtime_dir = "{tmp_path}/other"\ndevice = "host"\n', f"host in {tmp_path}/other"),
            (place + 'device = "cuda0"\n', f"cuda:0 in {folder}"),
        ):
            settings.write_text(lines)
            said = swapd("upgrade", "-e", folder, "--timeout", "20", status=1).stderr
            assert f"goes on: by its settings it would now serve {where}" in said
        assert client.session.error is None
        (tmp_path / "link").symlink_to(folder)
        settings.write_text(f'runtime_dir = "{tmp_path}/link"\ndevice = "host"\n')
        swapd("upgrade", "-e", folder)
        client.acquire("thinker").release()


def test_one_that_has_no_command_of_its_own_is_refused(folder: Path) -> None:
    program = (
        "from swapd.cli.serve import run; from swapd.shared.config import Config;"
        f"run(Config(budget=4 << 20, runtime_dir={str(folder)!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True
    )
    with process:
        assert line_of(process)
        said = swapd("upgrade", "-e", folder, status=1).stderr
        assert "part of another program. Nothing has changed" in said
        swapd("stop", "-e", folder)
    assert process.returncode == 0


def test_two_upgrades_at_once_end_well(daemon: Running) -> None:
    client = daemon.client("worker", thinker=4)
    for _ in range(3):
        daemon.process.send_signal(signal.SIGUSR2)
    client.session.life.await_end()
    client.acquire("thinker").release()
    assert daemon.process.poll() is None


def test_a_reload_meanwhile_ends_nothing(daemon: Running) -> None:
    """As by `systemctl reload`, or by a tool that rotates logs."""
    client = daemon.client("worker", thinker=4)
    with ThreadPoolExecutor() as pool:
        daemon.process.send_signal(signal.SIGUSR2)
        client.session.life.await_end()
        acquiring = pool.submit(client.acquire, "thinker")
        while not wait([acquiring], 0.02).done:
            daemon.process.send_signal(signal.SIGHUP)
        acquiring.result().release()
    assert daemon.process.poll() is None


def test_a_stop_meanwhile_stops(daemon: Running) -> None:
    daemon.client("worker", thinker=4)
    daemon.process.send_signal(signal.SIGSTOP)
    daemon.process.send_signal(signal.SIGUSR2)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.send_signal(signal.SIGCONT)
    daemon.process.wait(60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_stops_while_the_first_program_still_ends(
    folder: Path, number: signal.Signals
) -> None:
    """The end of the page's process takes a while, in which no loop runs."""
    words = ["--device", "host", "--budget", "16MiB", "--http", "127.0.0.1:0"]
    with ended(launched(folder, *words)) as running:
        running.process.send_signal(signal.SIGUSR2)
        while (folder / runtime_dir.LIFELINE).exists():
            pass
        running.process.send_signal(number)
        running.process.wait(60)


def test_nobody_else_takes_the_folder_meanwhile(folder: Path) -> None:
    """Between the two programs of one process."""
    first = (
        "import os, sys; from pathlib import Path; from swapd.shared import runtime_dir;"
        "folder = runtime_dir.claim(Path(sys.argv[1])); folder.leave_locked();"
        "os.execv(sys.executable, [sys.executable, '-c', *sys.argv[2:0:-1]])"
    )
    second = (
        "import os, sys; print('between', flush=True); sys.stdin.readline();"
        "from pathlib import Path; from swapd.shared import runtime_dir;"
        "folder = runtime_dir.claim(Path(sys.argv[1])); print('claimed', flush=True);"
        "sys.stdin.readline(); folder.close()"
    )
    command = [sys.executable, "-c", first, str(folder), second]
    with subprocess.Popen(
        command, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for where in ("between\n", "claimed\n"):
            assert process.stdout.readline() == where
            with pytest.raises(RuntimeDirError, match=f"process {process.pid}"):
                runtime_dir.claim(folder)
            tell(process)
    with runtime_dir.claim(folder):
        pass


def test_a_worker_of_a_version_before_joins_it_and_an_older_one_hears_what_to_do(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "VERSION", protocol.OLDEST)
    daemon.client("worker", thinker=4).acquire("thinker").release()
    monkeypatch.setattr(protocol, "VERSION", protocol.OLDEST - 1)
    with pytest.raises(VersionMismatch, match="swapd upgrade"):
        swapd_client.connect(daemon.folder)
