"""Paths that no other user can redirect: part by part, links by hand, no stranger's files."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapd.shared import runtime_dir
from swapd.shared.runtime_dir import Untrusted, open_folder, open_named
from tests.files import file_with
from tests.processes import output_of

NOBODY = 65534
APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can have things of two users")


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


def place(path: Path) -> tuple[int, int]:
    """The device and inode at the end of a path."""
    with open_folder(path) as found:
        there = os.fstat(found.fileno())
        return there.st_dev, there.st_ino


def same(path: Path) -> tuple[int, int]:
    there = path.stat()
    return there.st_dev, there.st_ino


def refusal(path: Path) -> str:
    with pytest.raises(Untrusted) as refused:
        open_folder(path)
    return str(refused.value)


# --- folders -----------------------------------------------------------------------------


def test_a_path_leads_where_the_kernel_says(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    for path in (deep, tmp_path / "a" / ".." / "a" / "." / "b", Path("/"), Path(f"/{deep}")):
        assert place(path) == same(path)


def test_links_of_one_s_own_and_of_root_are_followed(tmp_path: Path) -> None:
    (tmp_path / "run" / "host").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(tmp_path / "run")
    (tmp_path / "relative").symlink_to("run/../run")
    (tmp_path / "run" / "up").symlink_to("..")
    (tmp_path / "leaf").symlink_to("relative/up/absolute/host")
    for path in ("absolute/host", "relative/host", "run/up/run/host", "leaf"):
        assert place(tmp_path / path) == same(tmp_path / "run" / "host")
    assert place(Path("/var/run")) == same(Path("/var/run"))


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_folder(tmp_path / "a")


def test_what_is_missing_or_no_folder_is_said_as_the_system_does(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileNotFoundError):
        open_folder(tmp_path / "nothing" / "below")
    for name in ("file", "fifo", "file/below"):
        with pytest.raises(NotADirectoryError):
            open_folder(tmp_path / name)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_way_through_a_folder_that_others_can_write_to_is_refused(
    tmp_path: Path, mode: int
) -> None:
    (tmp_path / "open" / "run").mkdir(parents=True)
    (tmp_path / "open").chmod(mode)
    assert f"{tmp_path}/open can be written by other users (mode {mode:04o}" in refusal(
        tmp_path / "open" / "run"
    )
    with pytest.raises(Untrusted):
        open_folder(tmp_path / "open" / "new", make=True)
    assert not (tmp_path / "open" / "new").exists()
    with open_folder(tmp_path / "open") as found, pytest.raises(Untrusted):
        runtime_dir.check_folder(found, tmp_path / "open")


def test_in_a_sticky_folder_one_s_own_is_safe_and_links_are_not(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    (shared / "mine").mkdir(parents=True)
    (shared / "link").symlink_to(shared / "mine")
    shared.chmod(0o1777)
    assert place(shared / "mine") == same(shared / "mine")
    assert f"{shared}/link is a link in a folder that other users" in refusal(shared / "link")


@pytest.mark.parametrize("umask", [0, 0o277])
def test_what_is_made_is_private_whatever_the_umask_says(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        open_folder(tmp_path / "leaf", make=True).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "leaf").stat().st_mode) == 0o700


def test_what_is_made_on_the_way_can_be_passed_by_others(tmp_path: Path) -> None:
    open_folder(tmp_path / "swapd" / "host", make=True).close()
    assert stat.S_IMODE((tmp_path / "swapd").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "swapd" / "host").stat().st_mode) == 0o700


# --- of another user ---------------------------------------------------------------------


@as_root
def test_a_folder_of_another_user_is_no_way(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "run").mkdir(parents=True)
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    assert f"{tmp_path}/theirs belongs to user {NOBODY}" in refusal(tmp_path / "theirs" / "run")
    with pytest.raises(Untrusted):
        open_folder(tmp_path / "theirs" / "new", make=True)
    assert os.listdir(tmp_path / "theirs") == ["run"]


@as_root
def test_a_link_of_another_user_is_no_way(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
    assert f"{tmp_path}/link belongs to user {NOBODY}" in refusal(tmp_path / "link")


@as_root
def test_what_another_user_has_in_a_sticky_folder_is_no_way(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    (shared / "theirs").mkdir(parents=True)
    os.chown(shared / "theirs", NOBODY, NOBODY)
    shared.chmod(0o1777)
    assert "belongs to user" in refusal(shared / "theirs")


@as_root
def test_the_owner_of_the_root_folder_is_trusted_as_root_is(tmp_path: Path) -> None:
    """In some containers that is the user who built the image: they can change all programs."""
    output_of(Path(__file__).parent / "programs" / "another_root.py", tmp_path, anew=True)


# --- files by their path -----------------------------------------------------------------


def written(path: Path) -> None:
    with open_named(path, APPEND) as file:
        os.write(file.fileno(), b"more\n")


def test_a_file_is_made_for_its_user_alone_and_found_again(tmp_path: Path) -> None:
    written(tmp_path / "log")
    written(tmp_path / "log")
    assert (tmp_path / "log").read_text() == "more\nmore\n"
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_file_that_is_to_be_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_named(tmp_path / "log", os.O_RDONLY)
    assert list(tmp_path.iterdir()) == []


def test_a_link_of_one_s_own_leads_to_the_file_also_to_one_still_to_be_made(
    tmp_path: Path,
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "log").symlink_to("logs/today")
    written(tmp_path / "log")
    written(tmp_path / "log")
    assert (tmp_path / "logs" / "today").read_text() == "more\nmore\n"


def test_where_others_can_write_links_are_refused_and_one_s_own_files_are_not(
    tmp_path: Path,
) -> None:
    victim = file_with(tmp_path / "victim", "precious")
    for mode in (0o1777, 0o777, 0o775):
        shared = tmp_path / f"{mode:o}"
        shared.mkdir()
        (shared / "link").symlink_to(victim)
        (shared / "twin").hardlink_to(victim)
        shared.chmod(mode)
        written(shared / "log")
        written(shared / "log")
        with pytest.raises(Untrusted, match="is a link in a folder that other users"):
            written(shared / "link")
        with pytest.raises(Untrusted, match="has another name"):
            written(shared / "twin")
    assert victim.read_text() == "precious"


@as_root
def test_a_file_of_another_user_is_not_written_to_where_they_can_put_it(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    (shared / "log").touch()
    os.mkfifo(shared / "fifo")
    for name in ("log", "fifo"):
        os.chown(shared / name, NOBODY, NOBODY)
    shared.chmod(0o1777)
    for name in ("log", "fifo"):
        with pytest.raises(Untrusted, match="belongs to user"):
            written(shared / name)


def test_a_folder_in_the_place_of_a_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(IsADirectoryError):
            open_named(path, APPEND)
    with pytest.raises(FileNotFoundError):
        runtime_dir.folder_named(tmp_path / "nothing" / "log")
