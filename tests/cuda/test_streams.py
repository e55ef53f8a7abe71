"""A stream waits for copies that the host does not wait for, and never endlessly."""

import pytest

from tests.cuda.gpu_world import MIB, Daemon, Worker, World, failure

COPY_IN = "cuMemcpyHtoDAsync"
SEGMENTS = 4


@pytest.fixture
def daemon(world: World) -> Daemon:
    return world.daemon()


@pytest.fixture
def worker(world: World, daemon: Daemon) -> Worker:
    return world.worker(daemon)


def acquire_early(world: World, daemon: Daemon, worker: Worker) -> list[str]:
    """A lease on `a`, of which nothing has arrived; returns the digests of its segments."""
    digests: list[str] = worker.register_in_segments("a", 2 * MIB, SEGMENTS)
    world.hold(COPY_IN, daemon)
    worker.acquire("a", early=True)
    return digests


def test_work_starts_when_its_segment_is_there(
    world: World, daemon: Daemon, worker: Worker
) -> None:
    digests = acquire_early(world, daemon, worker)
    for i in range(SEGMENTS):
        worker.work_on_segment("a", i, stream=f"s{i}")
    assert not any(worker.is_done(stream=f"s{i}") for i in range(SEGMENTS))
    world.go_on()
    assert [worker.result(stream=f"s{i}") for i in range(SEGMENTS)] == digests
    worker.check("a")
    worker.release("a")


def test_what_is_there_is_not_waited_for(world: World, daemon: Daemon, worker: Worker) -> None:
    digests = worker.register_in_segments("a", 2 * MIB, SEGMENTS)
    worker.acquire("a")
    world.hold("cuStreamWaitValue64")
    worker.work_on_segment("a", 3)
    assert worker.result() == digests[3]
    world.go_on()


def test_a_release_waits_for_the_stream_that_waits(
    world: World, daemon: Daemon, worker: Worker
) -> None:
    acquire_early(world, daemon, worker)
    worker.work_on_segment("a", SEGMENTS - 1)
    worker.release("a")
    assert daemon.component("a").leases == 1
    world.go_on()
    daemon.await_record("Release")


@pytest.mark.parametrize("refusal", ["cuMemHostRegister 1", "cuStreamWaitValue64 801"])
def test_where_streams_cannot_wait_the_host_does(
    world: World, daemon: Daemon, worker: Worker, refusal: str
) -> None:
    digests = worker.register_in_segments("a", 2 * MIB, SEGMENTS)
    world.fake.faults(f"{COPY_IN} hold async pid={daemon.pid}", f"{refusal} pid={worker.pid}")
    worker.acquire("a", early=True)
    working = worker.start("work_on_segment", "a", 3)
    daemon.status()
    assert not working.done
    world.go_on(working)
    assert worker.result() == digests[3]


def test_the_daemon_dies_while_a_stream_waits(world: World, daemon: Daemon, worker: Worker) -> None:
    acquire_early(world, daemon, worker)
    worker.work_on_segment("a", 3)
    daemon.kill()
    worker.result()  # any bytes: the stream went on
    failure("DaemonGone", worker.check, "a")
    failure("DaemonGone", worker.work_on_segment, "a", 3)
    failure("DaemonGone", worker.release, "a")
    worker.disconnect()


def test_what_was_there_before_the_daemon_died_is_good(
    world: World, daemon: Daemon, worker: Worker
) -> None:
    digests = worker.register_in_segments("a", 2 * MIB, SEGMENTS)
    worker.acquire("a")
    worker.work_on_segment("a", 3)
    daemon.kill()
    worker.await_end()
    assert worker.result() == digests[3]
    worker.check("a")
    worker.release("a")


def test_a_load_that_fails_lets_the_stream_go_on_and_is_said(world: World) -> None:
    daemon, worker = world.alone(budget="32MiB")
    digests = worker.register_in_segments("a", 6 * MIB, SEGMENTS)
    # the daemon's first piece is held back, and the others fail
    refusal = f"{COPY_IN} 1 pid={daemon.pid}"
    world.fake.faults(f"{COPY_IN} hold times=1 async pid={daemon.pid}", refusal)
    worker.acquire("a", early=True)
    worker.work_on_segment("a", 3)
    worker.check("a")
    assert not worker.is_done()
    world.fake.faults(refusal)
    worker.result()  # any bytes: the stream went on, and has not faulted
    for use in (worker.check, worker.wait_for, worker.release):
        assert "was not loaded" in failure("DeviceFailed", use, "a")
    world.go_on()
    worker.acquire("a")
    assert worker.arrive("a", 3) == digests[3]
    worker.release("a")


def test_the_board_is_unpinned_and_unmapped_when_the_client_closes(
    world: World, daemon: Daemon, worker: Worker
) -> None:
    for _ in range(3):
        acquire_early(world, daemon, worker)
        worker.work_on_segment("a", 3)
        world.go_on()
        worker.result()
        worker.release("a")
        board = worker.board()
        assert worker.is_pinned(board)
        worker.disconnect()
        assert not worker.is_pinned(board)
    assert worker.count_boards() == 0
