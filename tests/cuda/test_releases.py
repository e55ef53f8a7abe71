"""A release takes effect when the work is done, off the caller's thread, and never before."""

import pytest

from tests.cuda.gpu_world import MIB, Daemon, Worker, WorkerError, World, waits

WORK = "cuMemcpyDtoDAsync"


def leases(daemon: Daemon, name: str) -> int:
    return daemon.component(name).leases


def leave_working(world: World, worker: Worker, nbytes: int) -> str:
    """Have a worker register and release `a` with work that is held back; its digest."""
    expected: str = worker.register("a", nbytes, seed=1)
    world.hold(WORK, worker)
    worker.leave_work("a")
    return expected


def assert_held_until_done(world: World, daemon: Daemon) -> None:
    assert leases(daemon, "a") == 1
    world.go_on()
    daemon.await_record("Release")
    assert leases(daemon, "a") == 0


def test_a_release_is_not_sent_before_the_work_is_done(world: World) -> None:
    daemon, worker, other = world.pair()
    other.register("b", 10 * MIB, seed=2)
    expected = leave_working(world, worker, 10 * MIB)
    assert leases(daemon, "a") == 1
    waiting = waits(daemon, other, "b")
    assert not worker.is_done()
    world.go_on(waiting)
    assert worker.result() == expected


def test_without_work_it_is_sent_at_once_and_no_thread_is_started(world: World) -> None:
    daemon, worker = world.alone()
    worker.register("a", 2 * MIB)
    for _ in range(3):
        worker.acquire("a")
        worker.release("a")
    assert leases(daemon, "a") == 0
    assert not [name for name in worker.threads() if name.startswith("swapd-release")]


def test_the_default_stream_counts_without_being_named(world: World) -> None:
    daemon, worker = world.alone()
    worker.register("a", 2 * MIB)
    world.hold(WORK, worker)
    worker.acquire("a")
    worker.work("a", stream="default", use=False)
    worker.release("a")
    assert_held_until_done(world, daemon)


def test_a_slow_stream_holds_up_no_other_s_release(world: World) -> None:
    daemon, worker = world.alone()
    worker.register("slow", 2 * MIB)
    worker.register("quick", 4 * MIB)
    worker.acquire("slow")
    worker.acquire("quick", lane="other")
    world.fake.faults(f"{WORK} hold times=1 async")
    worker.work("slow", stream="s1")
    worker.work("quick", stream="s2")
    worker.release("slow")
    worker.release("quick")
    daemon.await_record("Release")
    assert (leases(daemon, "slow"), leases(daemon, "quick")) == (1, 0)
    world.go_on()
    daemon.await_record("Release")
    assert leases(daemon, "slow") == 0


def test_a_lease_waits_for_all_its_streams(world: World) -> None:
    daemon, worker = world.alone()
    worker.register("a", 2 * MIB)
    worker.acquire("a")
    world.fake.faults(f"{WORK} hold times=1 async")
    worker.work("a", stream="s1")
    worker.work("a", stream="s2")
    worker.result(stream="s2")
    worker.release("a")
    assert_held_until_done(world, daemon)


def test_without_a_thread_to_be_had_the_caller_waits_for_the_work(world: World) -> None:
    daemon, worker = world.alone()
    worker.register("a", 2 * MIB)
    worker.grant_no_threads("swapd-")
    world.hold(WORK, worker)
    worker.acquire("a", lane="other")
    worker.work("a")
    releasing = worker.start("release", "a", lane="other")
    assert not worker.is_done()
    assert leases(daemon, "a") == 1
    world.go_on(releasing)
    daemon.await_record("Release")
    assert leases(daemon, "a") == 0


def test_the_thread_of_another_stream_waits_where_no_more_are_to_be_had(world: World) -> None:
    daemon, worker = world.alone()
    for name in ("a", "b"):
        worker.register(name, 2 * MIB)
        worker.acquire(name, lane=name)
    world.hold(WORK, worker)
    worker.work("a", stream="s1")
    worker.release("a", lane="a")
    worker.grant_no_threads("swapd-")
    worker.work("b", stream="s2")
    worker.release("b", lane="b")
    assert (leases(daemon, "a"), leases(daemon, "b")) == (1, 1)
    world.go_on()
    for _ in "ab":
        daemon.await_record("Release")
    assert (leases(daemon, "a"), leases(daemon, "b")) == (0, 0)


def test_a_thread_may_go_on_to_what_does_not_fit_beside_what_is_ending(world: World) -> None:
    """It waits for the GPU only, and that is no deadlock."""
    daemon, worker = world.alone()
    expected = worker.register("b", 10 * MIB, seed=2)
    leave_working(world, worker, 10 * MIB)
    going_on = waits(daemon, worker, "b")
    world.go_on(going_on)
    assert worker.look("b")[1] == expected


def test_who_holds_another_lease_waits_for_what_is_ending(world: World) -> None:
    """It is no deadlock: what ends with its work depends on no thread."""
    _, worker = world.alone()
    worker.register("kept", 2 * MIB)
    worker.register("a", 10 * MIB)
    expected = worker.register("b", 10 * MIB, seed=2)
    worker.acquire("kept")
    world.hold(WORK, worker)
    worker.leave_work("a")
    with pytest.raises(WorkerError, match="b not granted in 0 s"):
        worker.acquire("b", timeout=0.0)
    going_on = worker.start("acquire", "b")
    world.go_on(going_on)
    assert worker.look("b")[1] == expected


def test_two_that_wait_for_each_other_s_work_are_not_deadlocked(world: World) -> None:
    daemon, one, two = world.pair("one", "two")
    expected = [w.register(n, 6 * MIB, seed=s) for w, n, s in ((one, "a", 1), (two, "b", 2))]
    expected += [w.register(n, 8 * MIB, seed=s) for w, n, s in ((one, "c", 3), (two, "d", 4))]
    world.hold(WORK)
    for worker, name in ((one, "a"), (two, "b")):
        worker.leave_work(name)
    waiting = [one.start("acquire", "c"), two.start("acquire", "d")]
    daemon.await_record("Waiting")
    world.go_on()
    waiting[0].result()
    assert one.look("c")[1] == expected[2]
    one.release("c")
    waiting[1].result()
    assert two.look("d")[1] == expected[3]


def test_close_waits_for_the_work_of_released_leases(world: World) -> None:
    _, worker = world.alone()
    expected = leave_working(world, worker, 10 * MIB)
    closing = worker.start("disconnect", lane="closing")
    worker.is_done()
    assert not closing.done
    world.go_on(closing)
    assert worker.result() == expected
    assert worker.look("a")[1] == expected


def test_close_waits_for_the_work_of_leases_nobody_released(world: World) -> None:
    _, worker = world.alone()
    expected = worker.register("a", 10 * MIB, seed=1)
    world.hold(WORK, worker)
    worker.acquire("a")
    worker.work("a")
    closing = worker.start("disconnect", lane="closing")
    world.go_on(closing)
    assert worker.result() == expected


def test_a_thread_that_waits_for_work_ends_with_the_session(world: World) -> None:
    _, worker = world.alone()
    leave_working(world, worker, 2 * MIB)
    world.go_on()
    worker.disconnect()
    worker.join_threads("swapd-")


def test_work_that_faults_gives_the_lease_back_all_the_same(world: World) -> None:
    _, worker, other = world.pair()
    worker.register("a", 10 * MIB)
    expected = other.register("b", 10 * MIB, seed=2)
    world.fake.faults(f"{WORK} 719 async pid={worker.pid}")
    worker.leave_work("a")
    assert other.use("b")[1] == expected
    assert "CUDA_ERROR_LAUNCH_FAILED (719)" in worker.log
    assert worker.log.count("is lost") == 1


def test_the_daemon_dies_while_a_release_waits(world: World) -> None:
    daemon, worker = world.alone()
    expected = leave_working(world, worker, 10 * MIB)
    daemon.kill()
    assert worker.await_end().startswith("DaemonGone")
    world.go_on()
    assert worker.result() == expected
    worker.disconnect()
    assert worker.look("a")[1] == expected


def test_a_lease_that_lingers_waits_for_the_work_of_every_step(world: World) -> None:
    daemon, worker, other = world.pair(isolation="relaxed")
    expected = worker.register("a", 10 * MIB, seed=1)
    other.register("b", 10 * MIB)
    worker.acquire("a")
    worker.release("a")
    world.fake.faults(f"{WORK} hold times=1 async pid={worker.pid}")
    assert worker.step_with_work("a", 20) <= 2, "its streams are named once each"
    waiting = waits(daemon, other, "b")
    assert leases(daemon, "a") == 1
    world.go_on(waiting)
    assert worker.result() == expected


def test_what_was_just_used_may_be_unregistered_at_once(world: World) -> None:
    for isolation in ("strict", "relaxed"):
        daemon = world.daemon(isolation, isolation=isolation)
        worker = world.worker(daemon, isolation)
        expected = leave_working(world, worker, 10 * MIB)
        unregistering = worker.start("unregister", "a")
        world.go_on(unregistering)
        assert worker.look("a")[1] == expected
        worker.kill()
        daemon.close()


def test_a_loop_whose_work_outlasts_its_leases_need_not_ask_at_every_step(world: World) -> None:
    daemon, worker, other = world.pair(isolation="relaxed")
    worker.register("a", 10 * MIB)
    other.register("b", 10 * MIB, seed=2)
    steps = 100
    worker.decode("a", steps)
    assert len(daemon.watch.seen("Acquire")) < steps
    assert other.use("b")  # it holds nothing any more
    assert daemon.component("a").hits + 1 >= steps


def test_a_loop_may_destroy_the_streams_of_its_steps_and_their_work_is_waited_for(
    world: World,
) -> None:
    daemon, worker, other = world.pair(isolation="relaxed")
    worker.register("a", 10 * MIB, seed=1)
    other.register("b", 10 * MIB)
    world.fake.faults(f"{WORK} hold times=1 async pid={worker.pid}")
    worker.steps_on_streams_that_go("a", 20)
    waiting = waits(daemon, other, "b")
    assert leases(daemon, "a") == 1
    world.go_on(waiting)


def test_a_stream_may_be_destroyed_under_a_lease_that_rests(world: World) -> None:
    daemon, worker = world.alone()
    worker.register("a", 2 * MIB)
    worker.acquire("a")
    world.hold(WORK, worker)
    worker.work_and_rest("a")
    worker.release("a")
    assert_held_until_done(world, daemon)


# --- threads that had the leases ---------------------------------------------------------


def in_turn(world: World) -> tuple[Daemon, Worker]:
    """A worker whose main thread has used `a` and `b` in turn; the keeper expects it back."""
    daemon, worker = world.alone(isolation="relaxed")
    for name in "ab":
        worker.register(name, 2 * MIB)
    worker.linger_on()
    worker.sleeps_of_steps(["a", "b"], 2)
    return daemon, worker


def test_hits_with_work_wake_no_thread(world: World) -> None:
    """Neither with several components in turn, nor in a loop, at any frequency of releases."""
    _, worker = in_turn(world)
    assert worker.sleeps_of_steps(["a", "b"], 50) == {}
    worker.sleeps_of_steps(["a"], 2)
    assert worker.sleeps_of_steps(["a"], 50) == {}


def test_what_its_thread_looks_after_is_given_back_before_it_asks_again(world: World) -> None:
    daemon, worker = in_turn(world)
    worker.leave_work("a")
    worker.result()
    worker.acquire("b")
    assert leases(daemon, "a") == 0


@pytest.mark.parametrize("how", ["another waits", "it asks", "it closes"])
def test_what_its_thread_looks_after_is_waited_for_when(world: World, how: str) -> None:
    daemon, worker = in_turn(world)
    other = world.worker(daemon, "other")
    other.register("c", 16 * MIB)
    world.hold(WORK, worker)
    worker.leave_work("a")
    assert leases(daemon, "a") == 1
    if how == "another waits":
        waiting = waits(daemon, other, "c")
    elif how == "it asks":
        worker.prefetch("b")
    else:
        waiting = worker.start("disconnect")
    world.go_on()
    if how == "it asks":
        daemon.await_record("Release")
    else:
        waiting.result()


# --- a loop that takes the same lease again and again --------------------------------------


def looping(world: World) -> tuple[Daemon, Worker, Worker]:
    """A worker that has used `a` in a loop, and one whose `c` does not fit beside it."""
    daemon, worker, other = world.pair(isolation="relaxed")
    worker.register("a", 2 * MIB)
    other.register("c", 16 * MIB)
    worker.linger_on()
    worker.loop("a", 2)
    return daemon, worker, other


def test_its_steps_call_no_driver(world: World) -> None:
    _, worker, _ = looping(world)
    assert worker.loop("a", 100) == 0


def test_its_last_step_s_work_is_waited_for(world: World) -> None:
    daemon, worker, other = looping(world)
    world.hold(WORK, worker)
    worker.step("a")
    waiting = waits(daemon, other, "c")
    worker.prefetch("a")  # it is to be given back before this
    assert leases(daemon, "a") == 1
    world.go_on(waiting)


def test_it_does_not_wait_for_the_work_under_another_lease(world: World) -> None:
    daemon, worker, other = looping(world)
    worker.register("b", 2 * MIB)
    worker.loop("b", 1)
    worker.loop("a", 2)
    worker.step("a")
    world.hold(WORK, worker)
    worker.acquire("b")
    worker.work("b", stream="default", use=False)
    other.unregister("c")
    other.register("d", 14 * MIB)
    other.acquire("d")
    world.go_on()
    worker.release("b")
    assert leases(daemon, "a") == 0


def test_a_stream_that_may_be_destroyed_is_marked_at_each_release(world: World) -> None:
    daemon, worker, other = looping(world)
    worker.work_of_torch_is_on("external", 0x7F00)
    assert worker.loop("a", 10) > 10
    world.hold(WORK, worker)
    worker.step("a", stream="external")
    worker.destroy("external")
    waiting = waits(daemon, other, "c")
    world.go_on(waiting)


def test_a_stream_that_captures_by_then_is_waited_for_after_the_capture(world: World) -> None:
    daemon, worker, other = looping(world)
    worker.work_of_torch_is_on("pooled", 3)
    assert worker.loop("a", 10) == 0
    world.hold(WORK, worker)
    worker.step("a", stream="pooled")
    worker.begin_capture(stream="pooled", mode="RELAXED")
    waiting = waits(daemon, other, "c")
    worker.prefetch("a")
    assert worker.end_capture(stream="pooled") == "CUDA_SUCCESS"
    assert leases(daemon, "a") == 1
    world.go_on(waiting)
