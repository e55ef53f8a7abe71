"""A process captures graphs in global mode, and no action of swapd meanwhile invalidates them."""

import pytest

from tests.cuda.gpu_world import MIB, Daemon, Worker, World, waits

COPY_IN = "cuMemcpyHtoDAsync"
WORK = "cuMemcpyDtoDAsync"


def prepared(world: World, isolation: str) -> tuple[Daemon, Worker, Worker]:
    """A worker with `a`, which is resident, and another with `b`: only one of them fits."""
    daemon, worker, other = world.pair(isolation=isolation)
    worker.register("a", 10 * MIB, seed=1)
    other.register("b", 10 * MIB, seed=2)
    worker.use("a")
    worker.is_done(stream="captured")
    return daemon, worker, other


def test_leases_are_taken_and_released_in_the_capturing_thread(world: World) -> None:
    _, worker, _ = prepared(world, "relaxed")
    worker.begin_capture()
    for _ in range(3):
        worker.acquire("a")
        worker.uses("a", stream="captured")
        worker.release("a")
    assert worker.end_capture() == "CUDA_SUCCESS"
    assert worker.capture_mode().endswith("GLOBAL"), "it is put back"


def test_components_come_and_go_in_other_threads(world: World) -> None:
    _, worker, _ = prepared(world, "strict")
    worker.register("c", 10 * MIB, seed=3)
    worker.begin_capture()
    worker.start("swap_both", "a", "c", 3, lane="loop").result()
    assert worker.end_capture() == "CUDA_SUCCESS"


@pytest.mark.parametrize("isolation", ["strict", "relaxed"])
def test_what_it_has_is_evicted_for_another_process(world: World, isolation: str) -> None:
    _, worker, other = prepared(world, isolation)
    worker.begin_capture()
    assert other.use("b")
    assert worker.end_capture() == "CUDA_SUCCESS"


def test_a_lease_is_kept_and_its_work_is_asked_for(world: World) -> None:
    daemon, worker, other = prepared(world, "relaxed")
    world.fake.faults(f"{WORK} hold times=1 async pid={worker.pid}")
    worker.start("step_with_work", "a", 20, lane="loop").result()
    worker.begin_capture()
    waiting = waits(daemon, other, "b")
    world.go_on()
    waiting.result()  # so the keeper's thread has queried the work, and released
    assert worker.end_capture() == "CUDA_SUCCESS"


def test_what_was_given_back_is_asked_for_by_the_thread_that_captures(world: World) -> None:
    daemon, worker, _ = prepared(world, "relaxed")
    worker.register("c", 2 * MIB, seed=3)
    worker.linger_on()
    worker.sleeps_of_steps(["a", "c"], 2)
    world.hold(WORK, worker)
    worker.acquire("a")
    worker.work("a")
    worker.begin_capture()
    worker.release("a")
    worker.acquire("c")
    assert daemon.component("a").leases == 1
    worker.release("c")
    world.go_on()
    worker.acquire("c")
    assert worker.end_capture() == "CUDA_SUCCESS"
    worker.result()
    worker.release("c")
    worker.acquire("c")
    assert daemon.component("a").leases == 0


def test_a_release_waits_for_work_from_before_the_capture(world: World) -> None:
    daemon, worker, _ = prepared(world, "strict")
    world.hold(WORK, worker)
    worker.acquire("a")
    worker.work("a", stream="s")
    worker.begin_capture()
    worker.release("a")
    assert daemon.component("a").leases == 1
    world.go_on()
    daemon.await_record("Release")
    assert worker.end_capture() == "CUDA_SUCCESS"


def test_a_release_waits_for_the_default_stream_while_nobody_can_tell_of_it(world: World) -> None:
    daemon, worker, _ = prepared(world, "strict")
    world.hold(WORK, worker)
    worker.acquire("a")
    worker.work("a", stream="default", use=False)
    worker.begin_capture(stream="blocking", mode="RELAXED")
    worker.release("a")
    assert daemon.component("a").leases == 1
    world.go_on()
    assert worker.end_capture(stream="blocking") == "CUDA_SUCCESS"
    daemon.await_record("Release")


def test_the_host_waits_for_what_a_stream_that_captures_is_to_wait_for(world: World) -> None:
    daemon, worker = world.alone()
    worker.register_in_segments("a", 2 * MIB, 4)
    worker.is_done(stream="captured")
    world.hold(COPY_IN, daemon)
    worker.acquire("a", early=True)
    worker.begin_capture()
    waiting = worker.start("wait_on", "a", 3, stream="captured")
    daemon.status()
    world.go_on()
    assert waiting.result(), "it was complete when the wait was over"
    assert worker.end_capture() == "CUDA_SUCCESS"


def test_the_daemon_dies(world: World) -> None:
    daemon, worker, _ = prepared(world, "strict")
    worker.acquire("a")
    worker.begin_capture()
    daemon.kill()
    worker.await_end()
    assert worker.end_capture() == "CUDA_SUCCESS"
    worker.disconnect()


def test_without_the_exchange_the_same_calls_would_spoil_it(world: World) -> None:
    """The driver here is strict: a query by the worker itself ends its capture."""
    _, worker, _ = prepared(world, "strict")
    worker.begin_capture()
    with pytest.raises(Exception, match="CAPTURE_UNSUPPORTED"):
        worker.start("is_done", stream="s", lane="loop").result()
    assert worker.end_capture() == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
