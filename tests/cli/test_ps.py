"""`swapd ps` lists all daemons of this user, and commands find the right one.

Other daemons of this user may run meanwhile, so the choice among several is tested on lists.
"""

import fcntl
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import swapd_client
from swapd.cli import target
from swapd.cli.daemons import DaemonEntry, _listed
from swapd.cli.daemons import ps_page as page
from swapd.cli.target import where
from swapd.shared import config, daemons
from swapd.shared.daemons import RunningDaemon, SeveralDaemons, only, running
from swapd_client import Client, InvalidArgument, NotRunning, connect
from swapd_client.session.endpoint import resolve
from tests.processes import output_of

from .conftest import Running, swapd
from .test_stopped import BRIEF, stopped

HERE = os.getpid()


def listed(daemon: Running, *words: object) -> dict[str, object]:
    (found,) = (
        row
        for row in json.loads(swapd("ps", "--json", *words).stdout)
        if row["pid"] == daemon.process.pid
    )
    assert isinstance(found, dict)
    return found


def test_a_daemon_is_listed_wherever_its_folder_is(daemon: Running) -> None:
    client = daemon.client("worker", thinker=4)
    with client.acquire("thinker"):
        row = listed(daemon)
    assert row["runtime_dir"] == str(daemon.folder)
    assert (row["device"], row["components"], row["sessions"]) == ("host", 1, 1)
    assert (row["used_bytes"], row["budget_bytes"]) == (4 << 20, 16 << 20)
    assert row["problem"] == ""


def test_one_that_does_not_answer_is_listed_with_the_reason(daemon: Running) -> None:
    with stopped(daemon):
        row = listed(daemon, "--timeout", BRIEF)
    assert "it is stopped" in str(row["problem"])
    assert row["device"] is None


def test_one_that_ends_while_it_is_asked_is_not_waited_for(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connected(*given: Any, **options: Any) -> Client:
        client = connect(*given, **options)
        daemon.stop(signal.SIGKILL)
        return client

    monkeypatch.setattr(swapd_client, "connect", connected)
    found = RunningDaemon(daemon.process.pid, daemon.folder)
    assert f"{daemon.folder}: the daemon is gone" in _listed(found, 1.0).problem


def test_one_whose_folder_was_removed_is_still_named(daemon: Running, folder: Path) -> None:
    shutil.rmtree(folder)
    (found,) = (each for each in running() if each.pid == daemon.process.pid)
    assert found.unreachable == "and the folder was removed"
    folder.mkdir()


def test_one_that_was_killed_is_not_listed(daemon: Running) -> None:
    daemon.stop(signal.SIGKILL)
    assert daemon.folder not in [found.folder for found in running()]


def test_what_others_lock_is_no_daemon(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        lock.write(f"{HERE}\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert HERE not in [found.pid for found in running()]


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users: only root can become another")
def test_those_of_other_users_are_passed_over(daemon: Running) -> None:
    program = """
        import os
        from swapd.shared import daemons
        os.setuid(65534)
        print([found.pid for found in daemons.running()])
    """
    assert str(daemon.process.pid) not in output_of(program)


def test_ps_fits_into_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    row = DaemonEntry(
        1, "/run/user/1000/swapd/cuda0", "cuda:0", "1", 99.0, 40 << 30, 38 << 30, 9, 8, 7
    )
    Console(width=80).print(page([row, DaemonEntry(2, "/b", problem="it is stopped")]))
    shown = capsys.readouterr().out
    assert "cuda:0" in shown
    assert "38 GiB of" in shown
    assert "process 2: it is stopped" in shown
    assert "/run/user/1000/swapd/cuda0" in shown.replace(" ", "").replace("\n", "")


# --- the choice --------------------------------------------------------------------------


def test_the_only_one_there_is_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.ENDPOINT_VARIABLE, raising=False)
    one = RunningDaemon(HERE, Path("/run/a"))
    hidden = RunningDaemon(HERE, Path("/run/b"), "in another mount namespace")
    monkeypatch.setattr(daemons, "running", lambda: [one, hidden])
    assert where(None, None, BRIEF) == resolve(None, None) == Path("/run/a")
    assert where("/run/c", None, BRIEF) == resolve("/run/c", None) == Path("/run/c")
    monkeypatch.setenv(config.ENDPOINT_VARIABLE, "/run/d")
    assert where(None, None, BRIEF) == resolve(None, None) == Path("/run/d")


def test_a_daemon_in_a_default_folder_is_meant_before_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(config.ENDPOINT_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    others = [RunningDaemon(HERE, Path("/run/a")), RunningDaemon(HERE, Path("/run/b"))]
    usual = RunningDaemon(HERE, tmp_path / "swapd" / "cuda1")
    monkeypatch.setattr(daemons, "running", lambda: [*others, usual])
    assert where(None, None, BRIEF) == resolve(None, None) == usual.folder
    monkeypatch.setattr(daemons, "running", lambda: others)
    with pytest.raises(InvalidArgument, match=r"/run/a.*, /run/b.* connect\(FOLDER\)"):
        resolve(None, None)


def test_without_a_daemon_it_is_where_serve_would_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(config.ENDPOINT_VARIABLE, raising=False)
    monkeypatch.delenv(config.VISIBLE_VARIABLE, raising=False)
    monkeypatch.setattr(daemons, "running", list)
    monkeypatch.setattr(config, "_DEVICES", tmp_path)
    assert resolve(None, None) == config.default_folder("host")
    (tmp_path / "nvidia0").touch()
    assert resolve(None, None) == config.default_folder("cuda:0")


def test_of_several_each_is_named() -> None:
    found = [RunningDaemon(7, Path("/run/a")), RunningDaemon(8, Path("/run/b"))]
    with pytest.raises(SeveralDaemons, match=r"2 daemons .*: /run/a \(process 7\), /run/b") as said:
        only(found)
    assert "--endpoint /run/a, --device or" in str(said.value)
    assert only([]) is None


def test_a_device_names_its_daemon_wherever_that_is(
    daemon: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/nothing")
    found = [
        RunningDaemon(daemon.process.pid, daemon.folder),
        RunningDaemon(HERE, Path("/run/gone")),
    ]
    monkeypatch.setattr(daemons, "running", lambda: found)
    assert where(None, "host", BRIEF) == daemon.folder
    assert where(None, "cuda", BRIEF) == Path("/run/nothing/swapd/cuda0")
    monkeypatch.setattr(target, "device_of", lambda at, _: "cuda:1" if at == daemon.folder else "")
    for named in ("cuda:1", "cuda1"):
        assert where(None, named, BRIEF) == daemon.folder


def test_a_daemon_that_runs_elsewhere_is_named_in_the_error(
    daemon: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = [RunningDaemon(daemon.process.pid, daemon.folder)]
    monkeypatch.setattr(daemons, "running", lambda: found)
    with pytest.raises(NotRunning) as refused:
        connect(tmp_path / "none")
    pid = daemon.process.pid
    assert f"though swapd runs at {daemon.folder} (process {pid})" in str(refused.value)
