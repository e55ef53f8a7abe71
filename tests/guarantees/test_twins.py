"""Workers with the same bytes: one copy on the device, and every guarantee for each of them."""

import pytest

from tests.guarantees.harness import Daemon, Worker, World

MIB = 1 << 20
ALIKE = 12 * MIB


@pytest.fixture(params=["relaxed", "strict"])
def daemon(world: World, request: pytest.FixtureRequest) -> Daemon:
    """With room for one component of this size."""
    return world.daemon(budget="16MiB", isolation=request.param)


def twins(world: World, daemon: Daemon, *labels: str) -> tuple[str, list[Worker]]:
    workers = world.workers(daemon, *labels)
    named = zip(labels, workers, strict=True)
    (expected,) = {worker.register(name, ALIKE, seed=1) for name, worker in named}
    return expected, workers


def test_2_four_replicas_compute_at_once_on_one_copy(world: World, daemon: Daemon) -> None:
    expected, workers = twins(world, daemon, *"abcd")
    for name, worker in zip("abcd", workers, strict=True):
        worker.acquire(name)
    assert [worker.look(n)[1] for n, worker in zip("abcd", workers, strict=True)] == 4 * [expected]
    status = daemon.status()
    assert (status.used_bytes, status.bytes_in, status.loads) == (ALIKE, ALIKE, 1)
    assert len({c.twins for c in status.components}) == 1


def test_1_what_one_still_holds_makes_way_for_nobody(world: World, daemon: Daemon) -> None:
    expected, (one, two) = twins(world, daemon, "a", "b")
    other = world.worker(daemon, "other")
    last = other.register("c", 16 * MIB)
    one.acquire("a")
    two.acquire("b")
    waiting = other.start("acquire", "c")
    daemon.await_record("Waiting", names=("c",))
    one.release("a")
    daemon.await_record("Evicted", name="a")
    assert two.look("b")[1] == expected
    two.release("b")
    waiting.result()
    assert other.look("c")[1] == last
    other.release("c")
    assert one.use("a")[1] == two.use("b")[1] == expected


def test_5_one_that_is_killed_takes_nothing_from_the_other(world: World, daemon: Daemon) -> None:
    expected, (one, two) = twins(world, daemon, "a", "b")
    one.acquire("a")
    two.acquire("b")
    one.kill()
    daemon.await_gone(one)
    assert two.look("b")[1] == expected
    two.release("b")
    assert two.use("b")[1] == expected
    assert daemon.status().bytes_in == ALIKE


def test_7_twins_outlive_their_daemon_and_share_nothing_then(world: World, daemon: Daemon) -> None:
    expected, (one, two) = twins(world, daemon, "a", "b")
    one.acquire("a")
    two.acquire("b")
    daemon.kill()
    for name, worker in (("a", one), ("b", two)):
        assert worker.look(name)[1] == expected
        worker.disconnect()
    one.write("a", 5)
    assert one.look("a")[1] != expected
    assert two.look("b")[1] == expected
