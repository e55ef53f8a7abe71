"""The runtime folder: its user's alone, and one daemon's at a time."""

import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from swapd.shared import runtime_dir
from swapd.shared.runtime_dir import EVENTS, LIFELINE, LOCK, RPC, RuntimeDirError, claim
from tests.files import file_with
from tests.processes import line_of, output_of, start_python


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_fds() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def refusal(folder: Path) -> str:
    before = open_fds()
    with pytest.raises(RuntimeDirError) as refused:
        claim(folder)
    assert open_fds() == before
    assert str(folder) in str(refused.value)
    return str(refused.value)


# --- the folder --------------------------------------------------------------------------


def test_a_claimed_folder_is_made_and_is_its_user_s_alone(folder: Path) -> None:
    with claim(folder / "deep" / "host"):
        assert mode(folder / "deep" / "host") == 0o700
        assert mode(folder / "deep" / "host" / LOCK) == 0o600


def test_a_folder_that_is_private_already_stays_as_it_is(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "swap-log.jsonl").write_text("old\n")
    with claim(folder):
        assert (folder / "swap-log.jsonl").read_text() == "old\n"


def test_a_file_in_its_place_is_refused(folder: Path) -> None:
    folder.write_text("a file")
    assert "choose another --runtime-dir" in refusal(folder)
    assert "choose another --runtime-dir" in refusal(folder / "below")


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert f"belongs to user {user}; choose another --runtime-dir" in refusal(folder)
    assert list(folder.iterdir()) == []


# --- folders that swapd did not make ---------------------------------------------------------


@pytest.mark.parametrize("mode", [0o755, 0o711, 0o750])
def test_a_folder_that_others_can_enter_is_refused_and_left_as_it_was(
    folder: Path, mode: int
) -> None:
    folder.mkdir()
    folder.chmod(mode)
    why = refusal(folder)
    assert f"chmod 700 {folder}" in why
    assert f"such as {folder}/swapd" in why
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert list(folder.iterdir()) == []
    with claim(folder / "swapd"):
        assert stat.S_IMODE(folder.stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o700])
def test_a_folder_with_other_things_in_it_is_refused_and_left_as_it_was(
    folder: Path, mode: int
) -> None:
    folder.mkdir()
    (folder / "notes").write_text("mine")
    folder.chmod(mode)
    why = refusal(folder)
    assert "is not empty and not swapd's: 'notes' is in it" in why
    assert f"such as {folder}/swapd" in why
    assert "chmod" not in why, "nobody is told to shut /tmp"
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    assert [path.name for path in folder.iterdir()] == ["notes"]


def test_an_empty_folder_that_others_use_too_is_not_to_be_shut(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o1777)
    assert "chmod" not in refusal(folder)


def test_a_name_in_a_refusal_is_harmless_on_a_terminal(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "\x1b]0;gotcha\a\n").touch()
    assert "'\\x1b]0;gotcha\\x07\\n' is in it" in refusal(folder)


def test_a_folder_that_swapd_made_is_taken_again_whatever_was_added(folder: Path) -> None:
    claim(folder).close()
    (folder / "serve.log").write_text("said")
    claim(folder).close()
    assert (folder / "serve.log").read_text() == "said"


def test_a_lock_that_swapd_did_not_write_makes_a_folder_nobody_s(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "notes").write_text("mine")
    (folder / LOCK).write_text("held by something else\n")
    assert "not swapd's" in refusal(folder)


def test_a_link_in_the_place_of_a_file_is_not_followed(folder: Path, tmp_path: Path) -> None:
    victim = file_with(tmp_path / "victim", "precious")
    folder.mkdir(mode=0o700)
    (folder / LOCK).symlink_to(victim)
    assert str(folder / LOCK) in refusal(folder)
    (folder / LOCK).unlink()
    os.link(victim, folder / LOCK)
    assert "is not a file of swapd's" in refusal(folder)
    assert victim.read_text() == "precious"
    os.unlink(folder / LOCK)
    (folder / LIFELINE).symlink_to(victim)
    with claim(folder):
        assert victim.read_text() == "precious"
        assert [path.name for path in folder.iterdir()] == [LOCK]


def test_a_fifo_in_the_place_of_the_lock_hangs_nobody(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / LOCK)
    with runtime_dir.find(folder) as found:
        assert found.holder() is None
    assert "is not a file of swapd's" in refusal(folder)


def test_what_was_opened_stays_what_it_is_when_its_path_is_bent(
    folder: Path, tmp_path: Path
) -> None:
    decoy = tmp_path / "decoy"
    decoy.mkdir(mode=0o700)
    with claim(folder) as claimed:
        folder.rename(tmp_path / "moved")
        folder.symlink_to(decoy)
        with socket.socket(socket.AF_UNIX) as listens:
            listens.bind(str(claimed.inside / LIFELINE))
        assert claimed.holder() == os.getpid()
        assert (tmp_path / "moved" / LIFELINE).is_socket()
        claimed.remove_sockets()
        assert list(decoy.iterdir()) == []


# --- the lock ----------------------------------------------------------------------------


def test_a_refused_claim_takes_nothing_away(folder: Path) -> None:
    with claim(folder):
        for name in (LIFELINE, RPC, EVENTS):
            (folder / name).touch()
        refusal(folder)
        assert all((folder / name).exists() for name in (LIFELINE, RPC, EVENTS, LOCK))
        assert (folder / LOCK).read_text() == f"{os.getpid()}\n"


def test_another_process_is_refused_too_and_two_folders_are_two(
    folder: Path, tmp_path: Path
) -> None:
    program = Path(__file__).parent / "programs" / "claims.py"
    with claim(folder):
        assert f"(process {os.getpid()})" in output_of(program, "once", folder)
        assert output_of(program, "once", tmp_path / "other") == ""
    assert output_of(program, "once", folder) == ""


def test_a_killed_daemon_s_folder_is_free_and_its_sockets_are_removed(folder: Path) -> None:
    program = Path(__file__).parent / "programs" / "claims.py"
    with start_python(program, "with_sockets", folder) as child:
        assert line_of(child).startswith("claimed")
        assert f"(process {child.pid})" in refusal(folder)
        child.send_signal(signal.SIGKILL)
    assert sorted(path.name for path in folder.iterdir()) == sorted([EVENTS, LIFELINE, LOCK, RPC])
    with claim(folder):
        assert [path.name for path in folder.iterdir()] == [LOCK]
        assert (folder / LOCK).read_text() == f"{os.getpid()}\n"


def _leads(fd: int, path: Path) -> bool:
    try:
        return path.samefile(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def test_the_lock_is_not_inherited_by_what_the_daemon_executes(folder: Path) -> None:
    with claim(folder) as claimed:
        opened = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _leads(fd, folder / LOCK)]
        assert len(opened) == 1
        for fd in (*opened, int(claimed.inside.name)):
            assert not os.get_inheritable(fd)


def test_a_lock_file_with_nothing_in_it_names_nobody(folder: Path) -> None:
    with claim(folder):
        os.truncate(folder / LOCK, 0)
        assert "(process unknown)" in refusal(folder)


def test_a_lock_that_cannot_be_opened_is_refused(folder: Path) -> None:
    (folder / LOCK).mkdir(parents=True)
    assert "choose another --runtime-dir" in refusal(folder)
