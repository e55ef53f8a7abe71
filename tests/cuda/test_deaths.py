"""Workers and daemons die by SIGKILL, sessions by a fence: the others go on."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.cuda.gpu_world import MIB, Daemon, Worker, World, failure, waits
from tests.guarantees.harness import await_exit

WORK = "cuMemcpyDtoDAsync"


def test_a_killed_worker_costs_the_others_nothing(world: World) -> None:
    daemon, dying, other = world.pair("dying", "other")
    dying.register("a", 10 * MIB)
    expected = other.register("b", 10 * MIB, seed=2)
    dying.acquire("a")
    world.hold(WORK, dying)
    dying.work("a")
    waiting = waits(daemon, other, "b")
    dying.kill()
    waiting.result()
    assert other.look("b")[1] == expected
    arena = daemon.status().budget_bytes
    other.release("b")
    assert world.fake.held_bytes() == arena


@pytest.fixture
def doomed(world: World) -> Iterator[tuple[Daemon, Worker, int]]:
    """A worker has written to a mutable component, and is killed; its kernel continues to write."""
    daemon, worker = world.alone("doomed")
    worker.register("m", 12 * MIB, mutable=True)
    worker.acquire("m")
    worker.write("m", 5)
    kernel = worker.leave_a_kernel()
    worker.kill()
    yield daemon, worker, kernel
    with suppress(ProcessLookupError):
        os.kill(kernel, signal.SIGKILL)
    await_exit(kernel)


def test_what_a_killed_worker_still_writes_reaches_nobody(
    world: World, doomed: tuple[Daemon, Worker, int]
) -> None:
    daemon, _, _ = doomed
    other = world.worker(daemon, "other")
    expected = other.register("b", 16 * MIB, seed=2)
    for _ in range(3):
        other.acquire("b")
        assert other.look("b")[1] == expected
        other.release("b")
    assert daemon.status().quarantined_bytes == 0
    assert world.fake.held_bytes() == (16 + 12) * MIB, "the old memory is nobody's"


def test_without_memory_in_its_place_nobody_has_what_a_killed_worker_may_write_to(
    world: World, doomed: tuple[Daemon, Worker, int]
) -> None:
    daemon, _, kernel = doomed
    daemon.await_record("ProcessExited")
    # the next time there is no other memory
    again = world.worker(daemon, "again")
    again.register("m", 12 * MIB, mutable=True)
    again.acquire("m")
    second = again.leave_a_kernel()
    with world.fake.occupied(world.fake.free_bytes()):
        again.kill()
        other = world.worker(daemon, "other")
        expected = other.register("b", 16 * MIB, seed=2)
        waiting = other.start("acquire", "b")
        daemon.await_record("Acquire", names=("b",))
        assert daemon.status().quarantined_bytes == 12 * MIB
        assert not waiting.done
        for one in (kernel, second):
            os.kill(one, signal.SIGKILL)
        waiting.result()
        assert other.look("b")[1] == expected
    await_exit(second)


def test_status_says_why_the_memory_of_a_killed_worker_is_missing(world: World) -> None:
    daemon, dying, other = world.pair("dying", "other")
    dying.register("m", 16 * MIB, mutable=True)
    expected = other.register("b", 16 * MIB, seed=2)
    dying.acquire("m")
    world.fake.faults(f"cuMemUnmap 304 pid={daemon.pid}")
    dying.kill()
    waiting = other.start("acquire", "b")
    while not (why := [note for note in daemon.status().notes if "exchange" in note]):
        pass
    assert "memory that session" in why[0]
    assert "304" in why[0]
    assert not waiting.done
    world.fake.faults()
    waiting.result()
    assert other.look("b")[1] == expected
    assert not any("exchange" in note for note in daemon.status().notes)


def test_a_worker_killed_in_the_middle_of_swaps_leaves_nothing(world: World) -> None:
    daemon, dying, other = world.pair("dying", "other", isolation="relaxed")
    for name in ("a", "b"):
        dying.register(name, 10 * MIB)
    expected = other.register("c", 6 * MIB, seed=3)
    dying.start("swap_both", "a", "b", 10_000)
    for _ in range(5):
        assert other.use("c")[1] == expected
    dying.kill()
    daemon.await_gone(dying)
    assert other.use("c")[1] == expected
    assert world.fake.held_bytes() == daemon.status().budget_bytes


@pytest.mark.parametrize("isolation", ["strict", "relaxed"])
def test_the_daemon_dies_and_what_is_held_stays(world: World, isolation: str) -> None:
    daemon, worker = world.alone(isolation=isolation)
    expected = [worker.register("held", 6 * MIB, seed=1), worker.register("idle", 6 * MIB, seed=2)]
    worker.use("idle")
    worker.acquire("held")
    address, _ = worker.look("held")
    daemon.kill()
    assert worker.await_end().startswith("DaemonGone")
    assert worker.look("held") == [address, expected[0]]
    worker.work("held")
    assert worker.result() == expected[0]
    worker.disconnect()
    assert worker.look("held") == [address, expected[0]]
    assert worker.look("idle")[1] == expected[1]
    worker.write("held", 5)  # it belongs to the worker now
    assert worker.look("held")[1] != expected[0]


def test_a_dead_daemon_s_memory_comes_free_for_the_next(world: World) -> None:
    daemon, worker = world.alone(budget="80MiB")
    expected = worker.register("a", 30 * MIB, seed=1)
    worker.use("a")
    daemon.kill()
    worker.await_end()
    worker.disconnect()
    assert worker.look("a")[1] == expected
    assert world.fake.held_bytes() == 30 * MIB
    world.daemon(budget="80MiB")


def test_what_is_mutable_survives_the_daemon(world: World) -> None:
    daemon, worker = world.alone()
    for name in ("shown", "hidden", "out"):
        worker.register(name, 4 * MIB, mutable=True)
    written = {}
    for seed, name in enumerate(("out", "hidden", "shown"), 1):
        worker.acquire(name)
        written[name] = worker.write(name, seed)
        if name != "shown":
            worker.release(name)
    worker.register("big", 8 * MIB)
    worker.use("big")
    assert daemon.component("out").state == "absent"
    daemon.kill()
    worker.await_end()
    worker.disconnect()
    assert {name: worker.look(name)[1] for name in written} == written


def test_a_worker_that_is_fenced_is_on_none_of_the_others_chunks(world: World) -> None:
    _, slow, other = world.pair("slow", "other", ack_timeout=0.2)
    expected = slow.register("a", 10 * MIB, seed=1)
    theirs = other.register("b", 10 * MIB, seed=2)
    slow.use("a")
    slow.stop()
    assert other.use("b")[1] == theirs  # after the time-out of the acknowledgement
    slow.go_on()
    assert slow.await_end().startswith("SessionFenced")
    failure("SessionFenced", slow.acquire, "a")
    slow.disconnect()
    assert slow.look("a")[1] == expected
    assert other.use("b")[1] == theirs


def test_a_fence_waits_for_the_work_that_is_under_way(world: World) -> None:
    _, slow, other = world.pair("slow", "other", ack_timeout=0.2)
    slow.register("idle", 8 * MIB)
    slow.register("held", 4 * MIB)
    other.register("b", 10 * MIB)
    slow.use("idle")
    slow.acquire("held")
    world.hold(WORK, slow)
    slow.work("held")
    slow.stop()
    other.use("b")
    slow.go_on()
    assert slow.await_end().startswith("SessionFenced")
    failure("SessionFenced", slow.release, "held")  # at once, not in a thread after the work
    world.go_on()
    slow.result()  # it may have read others' bytes, and has not faulted


def test_a_daemon_that_stops_lets_the_workers_keep_what_they_hold(world: World) -> None:
    daemon, worker = world.alone(stop_timeout=0.1)
    expected = worker.register("a", 6 * MIB, seed=1)
    worker.acquire("a")
    daemon.terminate()
    assert worker.await_end().startswith("DaemonGone")
    daemon.wait()
    assert worker.look("a")[1] == expected
    worker.disconnect()
    assert worker.look("a")[1] == expected


def test_a_revocation_leaves_no_import_s_memory_mapped(world: World) -> None:
    """The memory of an evicted component can go to another process's allocator."""
    daemon, worker, other = world.pair(budget="16MiB")
    expected = worker.register("a", 12 * MIB, seed=1)
    worker.use("a")
    other.acquire_workspace(14 * MIB)
    assert world.fake.held_bytes() == 2 * MIB
    other.allocate(14 * MIB)
    waiting = worker.start("use", "a")
    daemon.await_record("Waiting")
    other.free()
    other.release("workspace")
    assert waiting.result()[1] == expected


def test_after_many_workspaces_the_same_memory_is_there(world: World) -> None:
    _, worker = world.alone()
    expected = worker.register("a", 12 * MIB, seed=1)
    for _ in range(5):
        assert worker.use("a")[1] == expected
        worker.acquire_workspace(10 * MIB)
        worker.release("workspace")
    assert worker.use("a")[1] == expected
    before = worker.count_descriptors()
    for _ in range(5):
        worker.acquire_workspace(10 * MIB)
        worker.release("workspace")
        worker.use("a")
    assert worker.count_descriptors() == before
