"""The fate of a component on the GPU that leaves swapd, with and without free memory."""

import pytest

from tests.cuda.gpu_world import MIB, WorkerError, World


def test_unregistered_it_is_private_memory_at_the_same_address(world: World) -> None:
    _, worker, other = world.pair()
    expected = worker.register("a", 5 * MIB + 3, seed=1)
    address, _ = worker.use("a")
    worker.unregister("a")
    assert worker.look("a") == [address, expected]
    other.register("b", 16 * MIB)
    other.use("b")
    worker.write("a", 4)
    assert worker.look("a")[1] != expected
    assert world.fake.held_bytes() == (16 + 6) * MIB


def test_a_mutable_one_has_its_last_bytes_when_it_is_unregistered(world: World) -> None:
    _, worker = world.alone()
    worker.register("a", 5 * MIB, mutable=True)
    written = worker.use_to_write("a", 4)
    worker.unregister("a")
    assert worker.look("a")[1] == written


def test_without_room_it_stays_registered_and_says_what_is_missing(world: World) -> None:
    daemon, worker = world.alone(budget="80MiB")
    expected = worker.register("a", 60 * MIB, seed=1)
    with pytest.raises(WorkerError, match=r"'a' .* 48 MiB .* 12 MiB"):
        worker.unregister("a")
    assert worker.use("a")[1] == expected
    assert daemon.component("a").state == "idle"
    assert world.fake.held_bytes() == 80 * MIB


def test_a_refused_unregistration_gives_the_memory_back(world: World) -> None:
    _, worker = world.alone()
    worker.register("a", 10 * MIB)
    worker.acquire("a")
    with pytest.raises(WorkerError, match="leased"):
        worker.unregister("a")
    assert world.fake.held_bytes() == 16 * MIB
    worker.release("a")


def test_close_without_room_warns_of_the_components_and_goes_on(world: World) -> None:
    _, worker = world.alone(budget="80MiB")
    worker.register("large", 60 * MIB)
    expected = worker.register("small", 4 * MIB, seed=1)
    worker.use("small")
    said = worker.close_and_tell()
    assert len(said) == 1
    assert (
        "no room for private copies of 'large' (60 MiB): do not use their tensors any more"
        in said[0]
    )
    assert worker.look("small")[1] == expected
    with pytest.raises(WorkerError, match="ILLEGAL_ADDRESS"):
        worker.peek("large")


def test_what_is_not_to_be_kept_takes_no_memory_when_the_client_closes(world: World) -> None:
    daemon, worker = world.alone(budget="80MiB")
    worker.register("used", 8 * MIB)
    worker.register("idle", 8 * MIB)
    worker.use("idle")
    worker.acquire("used")
    worker.disconnect(keep=False)
    assert world.fake.held_bytes() == 80 * MIB
    daemon.await_gone(worker)
    assert not daemon.status().components
    for name in ("used", "idle"):
        with pytest.raises(WorkerError, match="ILLEGAL_ADDRESS"):
            worker.peek(name)


def test_who_keeps_nothing_has_no_context_after_closing(world: World) -> None:
    _, worker = world.alone()
    worker.register("a", 8 * MIB)
    worker.acquire("a")
    assert worker.pid in [one.pid for one in world.fake.allocations()]
    worker.disconnect(keep=False)
    assert worker.pid not in [one.pid for one in world.fake.allocations()]


def test_a_mutable_one_without_room_stays_where_it_is(world: World) -> None:
    """Its chunks stay with this process until it ends."""
    daemon, worker, other = world.pair(budget="80MiB")
    worker.register("a", 60 * MIB, mutable=True)
    written = worker.use_to_write("a", 1)
    assert worker.close_and_tell() == []
    other.register("b", 20 * MIB)
    other.use("b")
    assert worker.look("a")[1] == written
    worker.kill()
    daemon.await_record("ProcessExited")


def test_closed_under_a_lease_it_has_a_copy_of_its_own(world: World) -> None:
    _, worker, other = world.pair()
    expected = worker.register("a", 4 * MIB, seed=1)
    worker.acquire("a")
    worker.disconnect()
    other.register("b", 16 * MIB)
    other.use("b")
    assert worker.look("a")[1] == expected


def test_registering_again_after_closing(world: World) -> None:
    _, worker = world.alone()
    for seed in range(3):
        expected = worker.register(f"a{seed}", 4 * MIB, seed=seed)
        assert worker.use(f"a{seed}")[1] == expected
        worker.disconnect()
        assert worker.look(f"a{seed}")[1] == expected


def test_what_could_not_be_registered_leaves_nothing(world: World) -> None:
    _, worker = world.alone()
    worker.register("a", 4 * MIB)
    for name in ("a", "too large"):
        with pytest.raises(WorkerError):
            worker.register(name, 40 * MIB)
    worker.disconnect()
    assert world.fake.held_bytes() == (16 + 4) * MIB


def test_a_tensor_keeps_its_address_and_its_values(world: World) -> None:
    _, worker, other = world.pair()
    expected = worker.register_tensor("a", 6 * MIB, seed=1)
    other.register("b", 14 * MIB)
    worker.acquire("a")
    address, digest = worker.tensor("a")
    assert digest == expected
    worker.release("a")
    for _ in range(5):
        other.use("b")
        worker.acquire("a")
        assert worker.tensor("a") == [address, expected]
        worker.release("a")
    worker.unregister("a")
    assert worker.tensor("a") == [address, expected]


def test_the_cpu_is_told_that_it_cannot_read_it(world: World) -> None:
    _, worker = world.alone()
    worker.register("a", MIB)
    with pytest.raises(WorkerError, match=r"in GPU memory.*component\.address") as said:
        worker.view("a")
    assert said.value.kind == "InvalidSource"
