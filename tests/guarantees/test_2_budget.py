"""Guarantee 2: resident bytes and bytes in flight never exceed the budget.

Every test of this folder checks the peak when it ends; the tests here come near it.
"""

import pytest

from tests.guarantees.harness import MIB, WorkerError, World


def test_many_who_swap_at_once_stay_within_the_budget(world: World) -> None:
    daemon = world.daemon(budget="20MiB", bandwidth="400MB/s")
    workers = world.workers(daemon, "one", "two", "three")
    for i, worker in enumerate(workers):
        worker.register(f"clean{i}", 8 * MIB, seed=i)
        worker.register(f"mutable{i}", 6 * MIB, seed=10 + i, mutable=True)
    running = [
        worker.start("swap", f"{kind}{i}", 6, lane=kind)
        for i, worker in enumerate(workers)
        for kind in ("clean", "mutable")
    ]
    for swaps in running:
        swaps.result()
    status = daemon.status()
    assert 14 * MIB <= status.peak_bytes <= status.budget_bytes == 20 * MIB
    assert status.evictions > 0
    assert status.waiting == 0


def test_a_component_larger_than_the_budget_is_refused_at_registration(world: World) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    with pytest.raises(WorkerError) as refused:
        worker.register("huge", 17 * MIB)
    assert refused.value.kind == "TooLarge"
    assert "huge needs 18 MiB" in refused.value.message
    assert "the budget is 16 MiB" in refused.value.message
    assert not daemon.status().components
    whole = worker.register("huge", 16 * MIB)
    assert worker.use("huge")[1] == whole


def test_components_that_are_too_large_together_are_refused_at_once(world: World) -> None:
    daemon = world.daemon()
    worker, other = world.workers(daemon, "worker", "other")
    worker.register("a", 10 * MIB)
    worker.register("b", 8 * MIB)
    other.register("c", 16 * MIB)
    other.acquire("c")
    with pytest.raises(WorkerError, match=r"a \+ b needs 18 MiB") as refused:
        worker.acquire("a", "b")
    assert refused.value.kind == "TooLarge"
    other.release("c")
    worker.use("a")


def test_what_never_leaves_counts_against_those_that_come(world: World) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    worker.register("fixed", 8 * MIB, policy="permanent")
    worker.register("a", 12 * MIB)
    worker.use("fixed")
    with pytest.raises(WorkerError, match="beside 8 MiB that never leave") as refused:
        worker.acquire("a")
    assert refused.value.kind == "TooLarge"


def test_host_memory_that_is_too_small_for_a_master_refuses_the_registration(
    world: World,
) -> None:
    daemon = world.daemon(host_memory="12MiB")
    worker, other = world.workers(daemon, "worker", "other")
    a = worker.register("a", 8 * MIB, seed=1)
    with pytest.raises(WorkerError, match=r"host memory .* 8 MiB") as refused:
        other.register("b", 8 * MIB, seed=2)
    assert refused.value.kind == "OutOfMemory"
    assert daemon.status().host_copy_bytes == 8 * MIB
    assert worker.use("a")[1] == a

    worker.unregister("a")
    b = other.register("b", 8 * MIB, seed=2)
    assert other.use("b")[1] == b


def test_a_prefetch_brings_in_what_nobody_has_to_wait_for(world: World) -> None:
    daemon = world.daemon()
    worker, other = world.workers(daemon, "worker", "other")
    a = worker.register("a", 8 * MIB, seed=1)
    other.register("b", 16 * MIB, seed=2)
    worker.prefetch("a")
    copy = daemon.await_record("CopyIn", name="a")
    daemon.await_record("CopiedIn", generation=copy.generation)
    assert daemon.component("a").state == "idle"
    assert not worker.acquire("a")["loaded"]
    worker.release("a")

    other.acquire("b")
    worker.prefetch("a")
    assert daemon.component("a").state == "absent"
    other.release("b")
    copy = daemon.await_record("CopyIn", name="a")
    daemon.await_record("CopiedIn", generation=copy.generation)
    assert worker.acquire("a") == {"loaded": False, "waited_s": 0.0}
    assert worker.look("a")[1] == a
