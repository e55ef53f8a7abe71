"""Components are swapped on the GPU: the same addresses, the right bytes, no leftovers."""

import pytest

from tests.cuda.gpu_world import MIB, Worker, WorkerError, World, failure


def test_it_comes_back_on_other_chunks_at_the_same_address(world: World) -> None:
    daemon, worker, other = world.pair()
    expected = worker.register("a", 6 * MIB, seed=1)
    for i, name in enumerate(("b", "c")):
        other.register(name, (8 - 2 * i) * MIB, seed=2 + i)
    address = worker.address("a")
    for _ in range(10):
        other.swap("b", 1)
        other.swap("c", 1)
        assert worker.use("a") == [address, expected]
    placed = {copy.runs for copy in daemon.watch.seen("CopyIn") if copy.name == "a"}
    assert len(placed) > 1, "it always came back to the same chunks: that proves little"


@pytest.mark.parametrize("isolation", ["strict", "relaxed"])
def test_workers_take_turns_and_each_finds_its_own_bytes(world: World, isolation: str) -> None:
    daemon = world.daemon(isolation=isolation)
    workers = world.workers(daemon, "one", "two")
    expected = [w.register("mine", 10 * MIB + 4096, seed=i) for i, w in enumerate(workers[:1])]
    expected.append(workers[1].register("theirs", 12 * MIB, seed=7))
    for _ in range(5):
        for worker, name, digest in zip(workers, ("mine", "theirs"), expected, strict=True):
            assert worker.use(name)[1] == digest
    assert daemon.status().evictions >= 9


def test_what_a_mutable_component_was_given_is_there_when_it_comes_back(world: World) -> None:
    daemon, worker, other = world.pair()
    worker.register("state", 6 * MIB, mutable=True)
    other.register("big", 14 * MIB)
    for seed in range(1, 4):
        written = worker.use_to_write("state", seed)
        other.use("big")
        assert daemon.component("state").state == "absent"
        assert worker.use("state")[1] == written


def test_cuda_is_left_alone_until_something_is_registered(world: World) -> None:
    _, owner, user = world.pair("owner", "user")
    owner.register("a", MIB)
    user.acquire("a")
    user.release("a")
    assert not user.uses_cuda(), "a child that it forks could not use the GPU any more"
    assert owner.uses_cuda()


def test_a_stray_access_faults_in_the_offender_alone(world: World) -> None:
    _, good, bad = world.pair("good", "bad")
    expected = good.register("good", 2 * MIB, seed=3)
    bad.register("bad", 2 * MIB)
    bad.use("bad")
    with pytest.raises(WorkerError, match="ILLEGAL_ADDRESS"):
        bad.peek("bad")
    assert good.use("good")[1] == expected
    bad.kill()
    assert good.use("good")[1] == expected


def test_what_is_clean_cannot_be_written_to(world: World) -> None:
    _, worker, other = world.pair()
    expected = worker.register("a", 2 * MIB, seed=1)
    worker.acquire("a")
    with pytest.raises(WorkerError, match="ILLEGAL_ADDRESS"):
        worker.write("a", 5)
    worker.kill()
    assert other.register("b", 2 * MIB, seed=1) == expected == other.use("b")[1]


def test_a_worker_that_lost_its_gpu_gives_back_what_it_holds(world: World) -> None:
    _, bad, other = world.pair("bad", "other")
    bad.register("a", 12 * MIB)
    expected = other.register("b", 12 * MIB, seed=1)
    bad.acquire("a")
    with pytest.raises(WorkerError, match="ILLEGAL_ADDRESS"):
        bad.write("a", 1)
    bad.release("a")
    assert other.use("b")[1] == expected
    assert "start it again" in failure("DeviceFailed", bad.acquire, "a")
    assert other.use("b")[1] == expected
    assert "is lost" in bad.log


def test_descriptors_and_memory_stay_constant_over_two_hundred_swaps(world: World) -> None:
    _, worker = world.alone(isolation="relaxed", swap_log_size="64MiB")
    worker.register("a", 8 * MIB)
    worker.register("b", 10 * MIB)
    _swap(worker, 20)
    before = worker.count_descriptors(), world.fake.held_bytes()
    _swap(worker, 200)
    assert (worker.count_descriptors(), world.fake.held_bytes()) == before


def _swap(worker: Worker, times: int) -> None:
    for _ in range(times // 20):
        worker.swap_both("a", "b", 10)


def test_a_component_of_nothing(world: World) -> None:
    _, worker = world.alone()
    worker.register("empty", 0)
    worker.acquire("empty")
    worker.release("empty")
    worker.unregister("empty")
    worker.register("empty", 0)
    worker.disconnect()
