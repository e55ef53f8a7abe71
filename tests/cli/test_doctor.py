"""`swapd doctor`: each check by itself, and the command on this machine."""

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any, NoReturn

import pytest

from swapd import __version__
from swapd.cli import doctor as command
from swapd.cli.target import ChosenDaemon
from swapd.device.host import Group
from swapd.doctor import Check
from swapd.doctor import host as doctor
from swapd.doctor.daemon import examine, of_status
from swapd.shared import daemons, vm
from swapd.shared.daemons import RunningDaemon
from swapd.shared.protocol import SessionStatus

from .conftest import Running, on_terminal, swapd
from .test_status import _reply

GIB = 1 << 30


@pytest.mark.parametrize(
    ("check", "status", "says"),
    [
        (doctor.kernel("Linux", "5.4.0-150-generic"), "fail", "use Linux 5.14 or later"),
        (doctor.kernel("Linux", "5.14.0"), "ok", ""),
        (doctor.kernel("Linux", "6.1"), "ok", ""),
        (doctor.kernel("Darwin", "23.1"), "fail", "swapd needs Linux"),
        (doctor.memory(20 * GIB, None), "ok", "20 GiB available, no cgroup limit"),
        (doctor.memory(8 * GIB, Group(Path("/cg/a"), 8 * GIB, 0)), "ok", "8 GiB in cgroup /cg/a"),
        (doctor.memory(GIB, None), "warn", "arena and host copies live there"),
        (doctor.open_files(256), "warn", "ulimit -n"),
        (doctor.open_files(65536), "ok", "up to 65536"),
        (doctor.locked_memory(8 << 20), "ok", "up to 8 MiB"),
        (doctor.locked_memory(resource.RLIM_INFINITY), "ok", "no limit"),
        (doctor.huge_pages(Path("/nowhere")), "warn", "no /nowhere"),
        (doctor.package("msgspec", needed=True), "ok", ""),
        (doctor.package("swapd-is-not-so", extra="demo"), "warn", "pip install 'swapd[demo]'"),
        (doctor.package("swapd-is-not-so", needed=True), "fail", "pip install swapd-is-not-so"),
    ],
)
def test_a_check_says_what_it_found_and_what_to_do(check: Check, status: str, says: str) -> None:
    assert check.status == status
    assert says in f"{check.found} {check.advice}"


@pytest.mark.parametrize(
    ("chosen", "status"),
    [("[advise] never", "ok"), ("[always] never", "ok"), ("[never]", "warn"), ("[deny]", "warn")],
)
def test_huge_pages_say_what_to_set(chosen: str, status: str, tmp_path: Path) -> None:
    (setting := tmp_path / "shmem_enabled").write_text(f"within_size {chosen} force\n")
    check = doctor.huge_pages(setting)
    assert check.status == status
    assert (f"echo advise | sudo tee {setting}" in check.advice) == (status == "warn")


def _refuse(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_what_the_kernel_refuses_is_said_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm, "populate_in_one", _refuse)
    monkeypatch.setattr(os, "pidfd_open", _refuse)
    for check, status in ((doctor.populate(), "warn"), (doctor.pidfd(), "fail")):
        assert check.status == status
        assert check.found == "does not work: Invalid argument"
        assert check.advice


def test_without_shelving_swaps_work_but_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm, "move_pages", _refuse)
    check = doctor.shelving()
    assert check.status == "warn"
    assert "fault every page anew" in check.advice


def test_what_is_tried_works_here_and_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    tried = (doctor.populate(), doctor.memfd_sealing(), doctor.pidfd(), doctor.peer_credentials())
    assert {check.status for check in tried} == {"ok"}
    assert doctor.shelving().status in ("ok", "warn")
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_runtime_folder_that_can_be_used(folder: Path) -> None:
    folder.chmod(0o700)
    assert doctor.folder_usable(folder) == Check("runtime folder", "ok", f"{folder}, mode 0700")
    made = doctor.folder_usable(folder / "a" / "b")
    assert made.status == "ok"
    assert "still to be made" in made.found
    assert not (folder / "a").exists()
    long = doctor.folder_usable(folder / ("x" * 100) / ("y" * 100))
    assert (long.status, long.advice) == ("ok", "")


def test_a_runtime_folder_that_cannot(folder: Path) -> None:
    folder.chmod(0o755)
    check = doctor.folder_usable(folder)
    assert check.status == "fail"
    assert f"chmod 700 {folder}" in check.advice
    folder.chmod(0o777)
    assert "written by other users" in doctor.folder_usable(folder / "below").found
    folder.chmod(0o700)
    (folder / "file").touch()
    assert doctor.folder_usable(folder / "file").status == "fail"
    assert doctor.folder_usable(folder / "file" / "below").status == "fail"


def test_a_folder_of_somebody_else_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: there + 1)
    check = doctor.folder_usable(folder)
    assert check.status == "fail"
    assert f"belongs to user {there}" in check.found


def test_a_daemon_that_runs_and_one_that_does_not(daemon: Running, tmp_path: Path) -> None:
    daemon.client("worker", vae=2)
    found = {check.name: check for check in examine(daemon.folder, 60)}
    assert {check.status for check in found.values()} == {"ok"}
    assert found["daemon"].found.endswith("serves host, 1 component")
    assert found["sessions"].found == "1 session; requests that wait: 0"
    assert found["daemon budget"].found.startswith("16 MiB; host copies have 2 MiB, and ")
    assert found["swap log"].found.startswith(f"{daemon.swap_log}, ")
    assert examine(tmp_path, 60) == [
        Check("daemon", "ok", "none runs there", "start one: swapd serve")
    ]


PINNING = "1 GiB of 2 GiB of host copies are pinned; the rest is copied through a buffer"
DEAF = (SessionStatus(3, "thinker", 0, 0, unread=True), SessionStatus(4, "talker", 0, 0))


@pytest.mark.parametrize(
    ("name", "changes", "found", "advice"),
    [
        ("daemon", {"version": "0.0.9"}, "swapd 0.0.9 serves host", f"this is swapd {__version__}"),
        (
            "daemon budget",
            {"device": "cuda:0", "device_bytes": 80 * GIB, "device_free_bytes": 1},
            "40 GiB; 1 B of cuda:0 are free",
            "lower --budget",
        ),
        ("daemon budget", {"budget_bytes": 1 << 60, "host_copy_bytes": 0}, "", "lower --budget"),
        ("daemon pinning", {"notes": (PINNING,)}, PINNING, "raise --pin-limit"),
        ("daemon pinning", {"notes": (PINNING,)}, PINNING, "LimitMEMLOCK"),
        ("swap log", {"swap_log": "/nowhere/log"}, "No such file or directory", "--swap-log"),
        (
            "sessions",
            {"sessions": DEAF},
            "thinker (session 3): does not read its messages",
            "look at these processes",
        ),
    ],
)
def test_what_is_amiss_with_a_daemon_is_said_with_what_to_do(
    name: str, changes: dict[str, Any], found: str, advice: str
) -> None:
    status = _reply(**{"version": __version__, "swap_log": "/dev/null", **changes})
    (check,) = (check for check in of_status(status) if check.name == name)
    assert check.status == "warn"
    assert found in check.found
    assert advice in check.advice


def test_the_command_as_json(folder: Path) -> None:
    rows = json.loads(swapd("doctor", "--json", "-e", folder).stdout)
    assert {row["status"] for row in rows} <= {"ok", "warn"}
    assert {"kernel", "memfd", "mremap", "runtime folder", "gpu"} <= {row["name"] for row in rows}


def test_each_of_several_daemons_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [RunningDaemon(pid, tmp_path / str(pid), "") for pid in (7, 8)]
    monkeypatch.setattr(daemons, "running", lambda: found)
    monkeypatch.delenv("SWAPD_ENDPOINT", raising=False)
    command.doctor(ChosenDaemon(), json=True)
    rows = json.loads(capsys.readouterr().out)
    folders = [row["found"] for row in rows if row["name"] == "runtime folder"]
    assert folders == [f"{one.folder}, still to be made" for one in found]
    assert sum(row["name"] == "daemon" for row in rows) == 2


def test_the_command_on_a_terminal(folder: Path) -> None:
    text = on_terminal("doctor", "-e", folder)
    assert "nothing needed is missing" in text
    assert "'swapd[" not in text or "pip install" in text


def test_something_missing_ends_with_status_1(folder: Path) -> None:
    (folder / "file").touch()
    done = swapd("doctor", "-e", folder / "file", status=1)
    assert "swapd does not run here: runtime folder" in done.stdout
    assert "choose another --runtime-dir" in done.stdout
