"""The memory that control groups leave counts, of whichever group above the process it is."""

from pathlib import Path

import pytest

from swapd.device import host
from swapd.device.host import Group

MIB = 1 << 20


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "_MOUNT", tmp_path)
    monkeypatch.setattr(host, "_SELF", tmp_path / "self")
    return tmp_path


VERSIONS = {
    "0::": ("", "memory.max", "memory.current"),
    "4:memory:": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    "3:cpu,memory:": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def limit(mount: Path, version: str, path: str, most: object, used: int = 0) -> Path:
    folder, of_limit, of_use = VERSIONS[version]
    group = mount / folder / path
    group.mkdir(parents=True, exist_ok=True)
    (group / of_limit).write_text(f"{most}\n")
    (group / of_use).write_text(f"{used}\n")
    return group


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("own", "limited"),
    [
        ("/system.slice/swapd.service", "system.slice/swapd.service"),  # systemd: MemoryMax=
        ("/slurm/uid_1/job_2/step_0/task_0", "slurm/uid_1/job_2"),  # Slurm limits the job
        ("/", ""),  # a container that sees its own group as the root
        ("/docker/1a2b", ""),  # the host's path, and the container's mount
        ("/../other", "other"),  # outside of the process's own namespace
    ],
)
def test_the_least_limit_up_to_the_root_counts(
    mount: Path, version: str, own: str, limited: str
) -> None:
    (mount / "self").write_text(f"9:pids:/elsewhere\n{version}{own}\n")
    limit(mount, version, own.strip("/").replace("../", ""), "max" if version == "0::" else 1 << 63)
    group = limit(mount, version, limited, 400 * MIB, 100 * MIB)
    assert host.least_limit() == Group(group, 400 * MIB, 100 * MIB)
    assert host.total_bytes() == 400 * MIB
    assert host.available_bytes() == 300 * MIB


@pytest.mark.parametrize(("version", "of_all_below"), [("0::", ""), ("4:memory:", "total_")])
def test_pages_of_files_that_were_read_are_available(
    mount: Path, version: str, of_all_below: str
) -> None:
    """The kernel drops them first; a job that has read its models has its limit full of them."""
    group = limit(mount, version, "", 400 * MIB, 390 * MIB)
    figures = {"active_file": 90 * MIB, "inactive_file": 200 * MIB, "shmem": 50 * MIB}
    lines = [f"{of_all_below}{name} {nbytes}\n" for name, nbytes in figures.items()]
    (group / "memory.stat").write_text("".join(lines))
    assert host.available_bytes() == 300 * MIB


def test_the_group_with_the_least_room_decides_what_is_available(mount: Path) -> None:
    (mount / "self").write_text("0::/a/b\n")
    outer, inner = (
        limit(mount, "0::", "a", 600 * MIB, 590 * MIB),
        limit(mount, "0::", "a/b", MIB << 8),
    )
    assert [group.path for group in host.groups()] == [inner, outer]
    assert host.total_bytes() == 256 * MIB
    assert host.available_bytes() == 10 * MIB


def test_where_both_versions_are_mounted_the_one_with_a_limit_counts(mount: Path) -> None:
    """As on a hybrid system, where version 2 has no memory controller."""
    (mount / "self").write_text("4:memory:/job\n0::/job\n")
    limit(mount, "0::", "job", "max", 5)
    group = limit(mount, "4:memory:", "job", 3 * MIB)
    assert host.least_limit() == Group(group, 3 * MIB, 0)


@pytest.mark.parametrize("most", [9223372036854771712, 9223372036854710272])
def test_a_group_without_a_limit_is_none(mount: Path, most: int) -> None:
    limit(mount, "4:memory:", "", most)
    assert host.least_limit() is None
    assert host.available_bytes() > 64 * MIB


def test_without_control_groups_there_is_no_limit(mount: Path) -> None:
    assert host.groups() == []
