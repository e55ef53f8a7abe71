"""Guarantee 2, of host memory: unregistered components are freed with their tensors, and counted.

By the kernel's figures, in real processes.
"""

import os

import pytest

from swapd.daemon.host_copies import NAME
from swapd.shared import system
from tests.guarantees.harness import MIB, Daemon, World

SIZE = 8 * MIB
#: After so many cycles the caches of the allocators of Python and torch stop growing.
WARM = 20
EACH = 2 * MIB
#: Far less than 50 times EACH.
SLACK = 16 * MIB


@pytest.fixture
def imported() -> tuple[str, ...]:
    return ("torch",)


def private(daemon: Daemon) -> int:
    """Bytes of unregistered components that are still mapped, except those of earlier tests in this
    process, which observes.
    """
    return daemon.status().private_bytes - system.private_bytes(os.getpid(), NAME)


def await_drops(daemon: Daemon) -> None:
    while daemon.status().host_copy_bytes:
        """A host copy is dropped in a thread, after the answer."""


@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "buffers"])
@pytest.mark.parametrize("mutable", [False, True], ids=["clean", "mutable"])
def test_50_components_registered_and_unregistered_in_turn_leave_nothing(
    world: World, tensors: bool, mutable: bool
) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    worker.register_and_unregister("a", EACH, WARM, tensors=tensors, mutable=mutable)
    before = worker.memory()
    worker.register_and_unregister("a", EACH, 50, tensors=tensors, mutable=mutable)
    after = worker.memory()
    for figure in ("Rss", "Pss", "masters", "mapped"):
        assert after[figure] - before[figure] < SLACK, (figure, before, after)
    assert after["masters"] == 0
    await_drops(daemon)
    assert private(daemon) == 0


def test_private_memory_is_there_as_long_as_a_tensor_of_it_and_status_counts_it(
    world: World,
) -> None:
    daemon = world.daemon()
    worker, other = world.workers(daemon, "worker", "other")
    other.ping()
    expected = {}
    for i in range(3):
        expected[i] = worker.register_tensor(f"t{i}", SIZE, seed=i)
        worker.swap(f"t{i}", 1)
    assert private(daemon) == 0
    for i in range(3):
        worker.unregister(f"t{i}")
        assert private(daemon) == (i + 1) * SIZE
    await_drops(daemon)
    for i in range(3):
        assert worker.tensor(f"t{i}")[1] == expected[i]
        worker.lose_tensor(f"t{i}")
        assert private(daemon) == (2 - i) * SIZE


def test_what_a_view_of_a_tensor_still_needs_stays(world: World) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    seen = worker.keep_half_of_a_tensor("t", SIZE)
    assert seen[0] == seen[1]
    assert private(daemon) == SIZE
    assert worker.lose_half() == seen[0]
    assert private(daemon) == 0


def test_what_nobody_has_any_more_when_it_is_unregistered_is_not_even_mapped(
    world: World,
) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    worker.register_tensor("t", SIZE)
    worker.lose_tensor("t")
    assert worker.use_without_looking("t")
    worker.unregister("t")
    assert private(daemon) == 0
    assert worker.memory()["masters"] == 0


def test_a_client_that_closes_leaves_what_its_tensors_need_and_no_more(world: World) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    kept = worker.register_tensor("kept", SIZE, seed=1)
    worker.register_tensor("lost", SIZE, seed=2)
    worker.lose_tensor("lost")
    worker.disconnect()
    assert worker.memory()["masters"] == SIZE
    assert worker.tensor("kept")[1] == kept
    worker.lose_tensor("kept")
    assert worker.memory()["masters"] == 0


def test_tensors_that_lost_their_daemon_and_went_are_no_obstacle_to_the_next(
    world: World,
) -> None:
    """Tensors registered again at their old address are freed in the end, too."""
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    t = worker.register_tensor("t", SIZE, seed=1)
    worker.register_tensor("u", SIZE, seed=2)
    address = worker.tensor_address("t")
    daemon.kill()
    worker.disconnect()
    worker.lose_tensor("u")
    assert worker.memory()["masters"] == SIZE
    again = world.daemon()
    assert worker.register_tensor_again("t") == address
    worker.unregister("t")
    assert worker.tensor("t") == [address, t]
    assert private(again) == SIZE
    worker.lose_tensor("t")
    assert private(again) == 0


def test_a_child_that_drops_what_it_inherited_frees_nothing_of_its_own(world: World) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    t = worker.register_tensor("t", SIZE, seed=1)
    worker.unregister("t")
    assert worker.fork_and_lose_tensor("t") == 0
    assert worker.tensor("t")[1] == t
