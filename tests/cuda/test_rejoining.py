"""Components that lost their daemon register with the next one, on the GPU: the same addresses."""

import pytest

from tests.cuda.gpu_world import MIB, Daemon, Worker, WorkerError, World, failure

#: The size of a range of 5 MiB and 3 bytes in private memory, and in chunks.
NBYTES, WHOLE = 5 * MIB + 3, 6 * MIB


@pytest.fixture
def imported() -> tuple[str, ...]:
    return ("torch",)


def lose(world: World, daemon: Daemon, *workers: Worker, **settings: str) -> Daemon:
    """Kill the daemon and return the next; the workers have their weights in private memory."""
    daemon.kill()
    for worker in workers:
        worker.disconnect()
    daemon = world.daemon(**settings)
    for worker in workers:
        worker.ping()
    return daemon


@pytest.mark.parametrize("held", [False, True], ids=["copied", "in use as it died"])
def test_it_has_its_address_and_its_bytes_and_is_swapped_again(world: World, held: bool) -> None:
    daemon, worker, other = world.pair()
    other.ping()
    expected = worker.register_tensor("a", NBYTES, seed=1)
    worker.acquire("a")
    address, _ = worker.tensor("a")
    for turn in range(2):
        if not held:
            worker.release("a")
        daemon = lose(world, daemon, worker, other)
        private = world.fake.held_bytes()
        assert worker.tensor("a") == [address, expected]
        assert worker.register_tensor_again("a") == address
        assert world.fake.held_bytes() == private - WHOLE, "the private memory is free"
        other.register(f"b{turn}", 16 * MIB)
        other.use(f"b{turn}")
        worker.acquire("a")
        assert worker.tensor("a") == [address, expected]
    assert daemon.component("a").loads == 1


@pytest.mark.parametrize("mutable", [False, True], ids=["clean", "mutable"])
def test_a_client_joins_the_next_daemon_with_all_that_it_has(world: World, mutable: bool) -> None:
    daemon, worker, other = world.pair()
    other.ping()
    expected = worker.register_tensor("a", NBYTES, seed=1, mutable=mutable)
    worker.acquire("a")
    address, _ = worker.tensor("a")
    if mutable:
        expected = worker.write("a", 4)
    worker.release("a")
    for turn in range(2):
        daemon.kill()
        daemon = world.daemon()
        worker.join_next()
        other.disconnect()
        other.register(f"b{turn}", 16 * MIB)
        other.use(f"b{turn}")
        assert worker.use("a") == [address, expected]
        assert daemon.component("a").mutable == mutable
        if turn:
            with pytest.raises(WorkerError, match="ILLEGAL_ADDRESS"):
                worker.peek("a")


def test_a_client_needs_no_room_for_private_copies(world: World) -> None:
    daemon, worker = world.alone(budget="80MiB")
    expected = worker.register_tensor("large", 60 * MIB)
    address, _ = worker.use("large")
    daemon.kill()
    world.daemon(budget="80MiB")
    worker.join_next()
    assert worker.use("large") == [address, expected]
    assert world.fake.held_bytes() == 80 * MIB


def test_what_a_fenced_worker_stayed_on_is_everybodys_when_it_has_registered_that_again(
    world: World,
) -> None:
    daemon, worker, other = world.pair(ack_timeout=0.2)
    other.register("all", 16 * MIB)
    expected = worker.register_tensor("m", NBYTES, seed=1, mutable=True)
    for _ in range(3):
        worker.acquire("m")
        worker.release("m")
        worker.stop()
        with pytest.raises(WorkerError, match="closes its client"):
            other.acquire("all")
        worker.go_on()
        assert worker.await_end().startswith("SessionFenced")
        worker.disconnect()
        assert worker.tensor("m")[1] == expected
        assert daemon.status().quarantined_bytes == WHOLE, "its tensors lie there"
        worker.register_tensor_again("m", mutable=True)
        assert daemon.status().quarantined_bytes == 0
    other.use("all")


def test_out_of_a_lease_a_use_faults_again(world: World) -> None:
    daemon, worker = world.alone()
    worker.register_tensor("a", NBYTES)
    lose(world, daemon, worker)
    worker.peek("a")
    worker.register_tensor_again("a")
    with pytest.raises(WorkerError, match="ILLEGAL_ADDRESS"):
        worker.peek("a")


def test_what_cannot_be_registered_stays_private(world: World) -> None:
    daemon, worker, other = world.pair()
    other.ping()
    expected = worker.register_tensor("a", NBYTES, seed=1)
    address = worker.address("a")
    daemon = lose(world, daemon, worker, other, budget="4MiB")
    failure("TooLarge", worker.register_tensor_again, "a")
    assert worker.tensor("a") == [address, expected]
    daemon = lose(world, daemon, worker, other)
    other.register("a", MIB)
    failure("DuplicateName", worker.register_tensor_again, "a")
    assert worker.tensor("a") == [address, expected]
    other.unregister("a")
    assert worker.register_tensor_again("a") == address
    worker.acquire("a")
    assert worker.tensor("a") == [address, expected]


def test_a_mutable_one_has_its_last_bytes(world: World) -> None:
    daemon, worker = world.alone()
    worker.register_tensor("a", NBYTES, mutable=True)
    worker.acquire("a")
    address = worker.address("a")
    written = worker.write("a", 4)
    lose(world, daemon, worker)
    assert worker.register_tensor_again("a", mutable=True) == address
    assert worker.use("a") == [address, written]


def test_smaller_chunks_fit_and_larger_ones_move_it(world: World) -> None:
    daemon, worker = world.alone(chunk="4MiB")
    expected = worker.register_tensor("a", NBYTES, seed=1)
    address = worker.address("a")
    daemon = lose(world, daemon, worker, chunk="2MiB")
    assert worker.register_tensor_again("a") == address
    assert worker.use("a") == [address, expected]
    daemon = lose(world, daemon, worker, chunk="16MiB")
    worker.register_tensor_again("a")
    worker.acquire("a")
    moved, digest = worker.tensor("a")
    assert moved != address
    assert digest == expected
