"""swapd pins host copies, whether or not the driver takes memory mapped read-only."""

from pathlib import Path

import pytest

from tests.cuda.gpu_world import MIB, World

PIN = "cuMemHostRegister"
SAYS_SO = "the GPU claims to pin memory that is mapped read-only, but refuses"


@pytest.mark.parametrize("refuses", [False, True], ids=["taken", "only said to be taken"])
def test_components_come_in_where_memory_that_is_read_only_is(
    world: World, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """In all other tests the driver refuses such memory."""
    monkeypatch.setenv("FAKECUDA_READ_ONLY_PINS", "1")
    if refuses:
        world.fake.faults(f"{PIN} 801 times=1")
    daemon = world.daemon()
    assert daemon.log.count(SAYS_SO) == refuses
    worker = world.worker(daemon)
    expected = worker.register("a", 10 * MIB, seed=1)
    maps = Path(f"/proc/{daemon.pid}/maps").read_text().splitlines()
    modes = {line.split()[1] for line in maps if "memfd:swapd-host-copy" in line}
    assert modes == {"rw-s" if refuses else "r--s"}
    world.fake.faults(f"{PIN} 801 pid={daemon.pid}")
    late = worker.register("b", 2 * MIB, seed=2)
    assert worker.use("a")[1] == expected
    assert worker.use("b")[1] == late
    assert daemon.log.count(SAYS_SO) == refuses, "it is said once"


def test_what_is_pinned_is_in_the_swap_log(world: World) -> None:
    """Also the refused part, and one record for components that are registered together."""
    daemon, worker = world.alone(pin_limit="6MiB")
    for number, name in enumerate("abc"):
        worker.register(name, 4 * MIB, seed=number)
    pinned = daemon.await_record("HostCopiesPinned")
    assert (pinned.nbytes, pinned.of) == (6 * MIB, 12 * MIB)
    assert SAYS_SO not in daemon.log, "it does not say so"
    assert "raise --pin-limit" in pinned.refused
    status = daemon.status()
    assert (status.pinned_bytes, status.unpinned_bytes) == (6 * MIB, 6 * MIB)
