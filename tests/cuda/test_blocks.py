"""A component streamed block by block on a GPU: the host runs ahead of it, within bounds."""

import pytest

from tests.cuda.gpu_world import MIB, Daemon, Worker, World, failure

BLOCKS = 6
COMPUTE = "cuMemcpyDtoDAsync"


@pytest.fixture
def daemon(world: World) -> Daemon:
    return world.daemon(isolation="relaxed")


@pytest.fixture
def worker(world: World, daemon: Daemon) -> Worker:
    return world.worker(daemon)


def blocks_in(daemon: Daemon) -> int:
    return sum(c.state not in ("absent", "revoking") for c in daemon.status().components)


def test_every_block_is_there_when_its_work_runs(daemon: Daemon, worker: Worker) -> None:
    digests = worker.register_blocks(BLOCKS, 2 * MIB, resident=0)
    for _ in range(3):
        worker.run_pass()
        assert worker.results() == digests
    worker.close_and_tell()
    assert daemon.status().peak_bytes <= 2 * 2 * MIB, "two slots, though there is room for more"


def test_the_host_goes_as_far_ahead_as_there_are_slots(
    world: World, daemon: Daemon, worker: Worker
) -> None:
    digests = worker.register_blocks(BLOCKS, 2 * MIB, resident=0)
    world.hold(COMPUTE, worker)
    running = worker.start("run_pass")
    daemon.await_record("CopiedIn")
    daemon.await_record("CopiedIn")
    assert not running.done
    assert blocks_in(daemon) == 2, "the work on them is still to be done"
    world.go_on(running)
    assert worker.results() == digests
    assert daemon.status().peak_bytes <= 2 * 2 * MIB


def test_a_stream_waits_for_a_block_and_the_host_does_not(
    world: World, daemon: Daemon, worker: Worker
) -> None:
    digests = worker.register_blocks(2, 2 * MIB, resident=0)
    world.hold("cuMemcpyHtoDAsync", daemon)
    worker.run_pass()  # both blocks have slots, and nothing has arrived
    assert all(c.state == "loading" for c in daemon.status().components)
    world.go_on()
    assert worker.results() == digests


def test_a_pass_over_what_is_kept_is_one_lease(daemon: Daemon, worker: Worker) -> None:
    digests = worker.register_blocks(BLOCKS, 2 * MIB)
    for _ in range(3):
        worker.run_pass()
        assert worker.results() == digests
    assert daemon.status().loads == BLOCKS


def test_the_daemon_dies_in_the_middle_of_a_pass(
    world: World, daemon: Daemon, worker: Worker
) -> None:
    worker.register_blocks(BLOCKS, 2 * MIB, resident=0)
    world.hold(COMPUTE, worker)
    running = worker.start("run_pass")
    daemon.await_record("CopiedIn")
    daemon.await_record("CopiedIn")
    daemon.kill()
    world.go_on()
    failure("DaemonGone", running.result)
    worker.disconnect()
