"""Guarantee 5, of other users: swapd changes, follows and believes nothing that they prepare.

Two real users: this process is root, and a process of the stranger does the stranger's actions.
"""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapd.shared import protocol
from swapd.shared.runtime_dir import EVENTS, LIFELINE, RPC, RuntimeDirError, claim
from swapd_client import NotRunning, connect
from tests import forked
from tests.guarantees.harness import MIB, PATIENCE_S, World, environment
from tests.processes import output_of, start_python

pytestmark = pytest.mark.skipif(
    os.getuid() != 0, reason="needs two users: only root can become another"
)

NOBODY = 65534

STRANGER = Path(__file__).parent / "programs" / "stranger.py"


def as_stranger(case: str, here: Path, *arguments: object) -> str:
    return output_of(STRANGER, case, here, *arguments)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp, with a folder of the stranger in it: `theirs`."""
    made = Path(tempfile.mkdtemp(prefix="swapd-", dir="/tmp"))
    made.chmod(0o1777)
    as_stranger("folder", made, "theirs")
    yield made
    shutil.rmtree(made)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of root that others may read, like /etc."""
    made = tmp_path / "etc"
    made.mkdir()
    (made / "passwd").write_text("root\n")
    made.chmod(0o755)
    return made


def assert_untouched(victim: Path) -> None:
    assert stat.S_IMODE(victim.stat().st_mode) == 0o755
    assert [path.name for path in victim.iterdir()] == ["passwd"]
    assert (victim / "passwd").read_text() == "root\n"


def refusal(folder: Path) -> str:
    """The output of `swapd serve` as root, which is one line."""
    process = forked.Popen(
        [sys.executable, "-m", "swapd", "serve", "--budget", "4MiB", "--runtime-dir", str(folder)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    err: str
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (1, ""), err
    assert len(err.splitlines()) == 1, err
    return err


# --- the daemon --------------------------------------------------------------------------


def test_serving_from_a_folder_for_all_changes_nothing_there(shared: Path) -> None:
    assert "choose another --runtime-dir" in refusal(shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    assert [path.name for path in shared.iterdir()] == ["theirs"]


@pytest.mark.parametrize("where", ["theirs", "theirs/run", "theirs/deep/run"])
def test_a_folder_in_one_of_a_stranger_is_refused(shared: Path, where: str) -> None:
    said = refusal(shared / where)
    assert f"{shared}/theirs belongs to user {NOBODY}; choose another" in said
    assert list((shared / "theirs").iterdir()) == []


@pytest.mark.parametrize("where", ["theirs/run", "theirs/run/host", "swapd-0", "swapd-0/host"])
def test_a_stranger_s_link_has_nothing_shut_or_written_to(
    shared: Path, victim: Path, where: str
) -> None:
    for name in ("theirs/run", "swapd-0"):
        as_stranger("link", shared, name, victim)
    assert "choose another --runtime-dir" in refusal(shared / where)
    assert_untouched(victim)


def test_a_stranger_who_swaps_a_folder_for_a_link_all_the_time_wins_nothing(
    shared: Path, victim: Path
) -> None:
    with start_python(STRANGER, "flip", shared, victim) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        for _ in range(300):
            with pytest.raises(RuntimeDirError):
                claim(shared / "theirs" / "run")
        stranger.kill()
    assert_untouched(victim)


def test_a_stranger_s_link_is_no_swap_log(shared: Path, victim: Path, world: World) -> None:
    as_stranger("link", shared, "theirs/log", victim / "passwd")
    daemon = world.daemon(swap_log=shared / "theirs" / "log")
    worker = world.worker(daemon, "worker")
    a = worker.register("a", MIB, seed=1)
    assert worker.use("a")[1] == a
    daemon.terminate()
    assert daemon.wait() == 0
    assert f"swap log {shared}/theirs/log: {shared}/theirs belongs to user {NOBODY}" in daemon.log
    assert_untouched(victim)


# --- the client --------------------------------------------------------------------------


def test_a_stranger_cannot_stand_between_a_client_and_its_daemon(
    shared: Path, world: World
) -> None:
    """Through a relayed lifeline the client would map the stranger's choice of memory."""
    daemon = world.daemon()
    for name in (LIFELINE, RPC, EVENTS):
        as_stranger("link", shared, f"theirs/{name}", daemon.folder / name)
    with pytest.raises(NotRunning, match=f"theirs .* user {NOBODY}"):
        connect(shared / "theirs")
    assert [one.label for one in daemon.status().sessions] == ["observer"]


def test_a_stranger_who_listens_where_anybody_may_is_not_asked(shared: Path) -> None:
    with start_python(STRANGER, "listen", shared, LIFELINE) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        with pytest.raises(NotRunning, match="other users"):
            connect(shared)
        stranger.kill()
        assert stranger.stdout.read() == ""


def test_each_user_has_a_daemon_of_one_s_own_and_no_other(shared: Path) -> None:
    with start_python(STRANGER, "run_a_daemon", shared) as theirs:
        try:
            assert theirs.stdout is not None
            assert theirs.stdout.readline().startswith("swapd serves host")
            assert as_stranger("use_the_daemon", shared) == f"{2 * MIB}\n"
            folder = shared / "swapd-65534" / "host"
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            with pytest.raises(NotRunning, match=f"belongs to user {NOBODY}"):
                connect(folder)
            assert f"belongs to user {NOBODY}" in refusal(folder)
        finally:
            theirs.send_signal(signal.SIGTERM)
    assert theirs.returncode == 0


# --- allowed -----------------------------------------------------------------------------


def test_a_client_stays_with_its_daemon_when_the_folder_s_path_is_bent(world: World) -> None:
    daemon, decoy = world.daemon(), world.daemon("decoy")
    with connect(daemon.folder, label="loyal") as client:
        daemon.folder.rename(world.folder / "moved")
        daemon.folder.symlink_to(decoy.folder)
        said: list[protocol.Status] = []
        thread = threading.Thread(target=lambda: said.append(client.status()))
        thread.start()  # it makes its own connection
        thread.join(PATIENCE_S)
        daemon.folder.unlink()
        (world.folder / "moved").rename(daemon.folder)
        assert [session.label for reply in said for session in reply.sessions] == ["loyal"]
