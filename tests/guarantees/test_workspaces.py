"""Workspace leases: memory of the arena for a worker's own allocator, under all guarantees."""

import pytest

from tests.guarantees.harness import MIB, WorkerError, World

BUDGET = 16 * MIB


def test_1_what_is_leased_is_not_lent(world: World) -> None:
    daemon = world.daemon()
    one, two = world.workers(daemon, "one", "two")
    a = one.register("a", 8 * MIB, seed=1)
    one.acquire("a")
    waiting = two.start("acquire_workspace", 12 * MIB)
    daemon.await_record("Waiting")
    assert one.look("a")[1] == a
    one.release("a")
    waiting.result()
    assert daemon.component("a").state == "absent"


@pytest.mark.parametrize("isolation", ["strict", "relaxed"])
def test_2_lent_memory_is_out_of_the_budget_until_it_is_back(world: World, isolation: str) -> None:
    daemon = world.daemon(isolation=isolation)
    one, two = world.workers(daemon, "one", "two")
    a = one.register("a", 12 * MIB, seed=1)
    one.use("a")
    two.acquire_workspace(8 * MIB)
    assert daemon.status().used_bytes == 8 * MIB
    waiting = one.start("use", "a")
    daemon.await_record("Waiting", names=("a",))
    two.release("workspace")
    assert waiting.result()[1] == a
    assert daemon.status().peak_bytes <= BUDGET
    assert [c.name for c in daemon.status().components] == ["a"]


def test_3_a_mutable_component_makes_room_and_loses_nothing(world: World) -> None:
    daemon = world.daemon()
    one, two = world.workers(daemon, "one", "two")
    one.register("m", 10 * MIB, mutable=True)
    one.acquire("m")
    written = one.write("m", 7)
    one.release("m")
    two.acquire_workspace(BUDGET)
    two.release("workspace")
    assert one.use("m")[1] == written


def test_5_memory_of_a_worker_that_is_killed_comes_back(world: World) -> None:
    daemon = world.daemon()
    one, two = world.workers(daemon, "one", "two")
    a = one.register("a", 12 * MIB, seed=1)
    two.acquire_workspace(12 * MIB)
    waiting = one.start("use", "a")
    daemon.await_record("Waiting", names=("a",))
    two.kill()
    assert waiting.result()[1] == a


def test_6_more_than_can_ever_be_lent_is_refused_at_once(world: World) -> None:
    daemon = world.daemon()
    one, two = world.workers(daemon, "one", "two")
    with pytest.raises(WorkerError, match="workspace of 17 MiB needs") as refused:
        one.acquire_workspace(17 * MIB)
    assert refused.value.kind == "TooLarge"
    one.acquire_workspace(12 * MIB)
    with pytest.raises(WorkerError, match=r"workspace of 12 MiB by one") as late:
        two.acquire_workspace(12 * MIB, timeout=0.01)
    assert late.value.kind == "Timeout"
    for nonsense in (0, -1):
        with pytest.raises(WorkerError, match="is no size of a workspace"):
            two.acquire_workspace(nonsense)


def test_6_two_that_hold_what_the_other_s_workspace_needs(world: World) -> None:
    daemon = world.daemon()
    one, two = world.workers(daemon, "one", "two")
    one.register("a", 8 * MIB)
    two.register("b", 8 * MIB)
    one.acquire("a")
    two.acquire("b")
    waiting = one.start("acquire_workspace", 8 * MIB)
    daemon.await_record("Waiting")
    with pytest.raises(WorkerError) as refused:
        two.acquire_workspace(8 * MIB)
    assert refused.value.kind == "Deadlock"
    two.release("b")
    waiting.result()


def test_7_stopping_waits_for_memory_that_is_lent(world: World) -> None:
    daemon = world.daemon()
    (one,) = world.workers(daemon, "one")
    one.acquire_workspace(8 * MIB)
    daemon.terminate()
    daemon.await_record("Stopping")
    assert daemon.running
    one.release("workspace")
    assert daemon.wait() == 0
