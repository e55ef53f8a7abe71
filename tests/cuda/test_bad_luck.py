"""Failures while the daemon serves a GPU: each hurts only its user, is reported, leaks nothing."""

import pytest

from tests.cuda.gpu_world import MIB, Daemon, WorkerError, World, failure
from tests.guarantees.harness import descriptors
from tests.processes import run_python

IN, OUT = "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync"
REFUSED = "CUDA_ERROR_INVALID_VALUE (1)"


def once(world: World, daemon: Daemon, function: str) -> None:
    world.fake.faults(f"{function} 1 times=1 pid={daemon.pid}")


# --- copies ------------------------------------------------------------------------------


def test_a_copy_in_that_fails_costs_who_waited_for_it_and_the_next_one_works(
    world: World,
) -> None:
    daemon, worker, other = world.pair()
    expected = worker.register("a", 10 * MIB, seed=1)
    theirs = other.register("b", 4 * MIB, seed=2)
    other.acquire("b")
    once(world, daemon, IN)
    said = failure("DeviceFailed", worker.acquire, "a")
    assert REFUSED in said
    assert "it is still in host memory; try again" in said
    assert daemon.component("a").state == "absent"
    assert worker.use("a")[1] == expected
    assert other.look("b")[1] == theirs
    assert daemon.status().notes == ()


def test_a_copy_out_that_fails_loses_nothing(world: World) -> None:
    daemon, writer, other = world.pair("writer", "other")
    writer.register("written", 10 * MIB, mutable=True)
    written = writer.use_to_write("written", 7)
    expected = other.register("b", 10 * MIB, seed=2)
    once(world, daemon, OUT)
    failure("DeviceFailed", other.acquire, "b")
    assert daemon.component("written").state == "idle"
    assert writer.use("written")[1] == written
    assert other.use("b")[1] == expected
    assert writer.use("written")[1] == written


def test_a_client_that_closes_keeps_what_could_not_be_saved(world: World) -> None:
    """And no other process gets its chunks while its process runs."""
    daemon, writer, other = world.pair("writer", "other")
    writer.register("written", 10 * MIB, mutable=True)
    written = writer.use_to_write("written", 7)
    world.fake.faults(f"{OUT} 1 pid={daemon.pid}")
    writer.disconnect()
    world.fake.faults()
    assert daemon.status().quarantined_bytes == 10 * MIB
    other.register("b", 6 * MIB)
    other.use("b")
    assert writer.look("written")[1] == written
    writer.kill()
    expected = other.register("c", 16 * MIB, seed=3)
    assert other.use("c")[1] == expected


def test_a_write_back_that_fails_half_way_loses_nothing(world: World) -> None:
    daemon, writer, other = world.pair("writer", "other", isolation="relaxed", pin_limit=0)
    writer.register("written", 14 * MIB, mutable=True)
    written = writer.use_to_write("written", 7)
    expected = other.register("b", 14 * MIB, seed=2)
    world.fake.faults(f"{OUT} 1 after=2 times=1 pid={daemon.pid}")
    failure("DeviceFailed", other.acquire, "b")
    assert daemon.await_record("CopyFailed").why.startswith(REFUSED)
    assert writer.use("written")[1] == written
    assert other.use("b")[1] == expected


def test_the_daemon_is_killed_in_the_middle_of_copies(world: World) -> None:
    daemon, writer, other = world.pair("writer", "other", budget="18MiB")
    writer.register("written", 6 * MIB, mutable=True)
    written = writer.use_to_write("written", 7)
    expected = other.register("b", 8 * MIB, seed=1)
    other.use("b")
    writer.register("c", 8 * MIB, seed=2)
    world.fake.faults(f"{OUT} hold async pid={daemon.pid}", f"{IN} hold async pid={daemon.pid}")
    other.register("d", 2 * MIB)
    other.prefetch("d")
    daemon.await_record("CopyIn", name="d")
    waiting = writer.start("acquire", "c", lane="c")
    daemon.await_record("CopyOut", name="written")
    daemon.kill()
    said = failure("DaemonGone", waiting.result)
    assert "Start swapd again" in said
    for worker in (writer, other):
        worker.await_end()
        worker.disconnect()
    assert writer.look("written")[1] == written
    assert other.look("b")[1] == expected
    for worker in (writer, other):
        worker.kill()
    assert world.fake.allocations() == []


def test_a_worker_is_killed_while_its_streams_wait(world: World) -> None:
    daemon, dying, other = world.pair("dying", "other")
    dying.register_in_segments("a", 4 * MIB, 4)
    expected = other.register("b", 16 * MIB, seed=1)
    world.hold(IN, daemon)
    dying.acquire("a", early=True)
    dying.work_on_segment("a", 3)
    dying.start("wait_for", "a", lane="host")
    dying.kill()
    daemon.await_gone(dying)
    world.go_on()
    assert other.use("b")[1] == expected
    assert world.fake.held_bytes() == daemon.status().budget_bytes


# --- host memory, descriptors ------------------------------------------------------------


@pytest.mark.parametrize(
    ("pin_limit", "fault", "pinned", "why"),
    [
        ("3MiB", "", "3 MiB of 8 MiB", "raise --pin-limit"),
        ("1GiB", "cuMemHostRegister 2 after=1", "4 MiB of 8 MiB", "CUDA_ERROR_OUT_OF_MEMORY (2)"),
    ],
    ids=["limit", "driver"],
)
def test_pinning_that_is_refused_half_way_costs_speed_alone(
    world: World, pin_limit: str, fault: str, pinned: str, why: str
) -> None:
    daemon, worker = world.alone(pin_limit=pin_limit)
    world.fake.faults(*([f"{fault} pid={daemon.pid}"] if fault else []))
    expected = {name: worker.register(name, 4 * MIB, seed=i) for i, name in enumerate("ab")}
    # the daemon pins them in sequence, in the background
    expected_note = f"{pinned} of host copies are pinned; the rest is copied"
    while not any(note.startswith(expected_note) for note in daemon.status().notes):
        assert daemon.running
    (note,) = daemon.status().notes
    assert "slower" in note
    assert why in note
    assert daemon.log.count("copied in two steps, more slowly") >= 1
    for name, digest in expected.items():
        assert worker.use(name)[1] == digest


def test_a_worker_raises_its_own_limit_of_descriptors_where_it_may(world: World) -> None:
    _, worker = world.alone(budget="64MiB")
    worker.ping()
    worker.allow_descriptors(10, at_most=1000)
    expected = worker.register("a", 64 * MIB)
    assert worker.use("a")[1] == expected


def test_a_worker_without_descriptors_is_told_and_the_others_go_on(world: World) -> None:
    daemon, poor, other = world.pair("poor", "other", budget="32MiB")
    mine = poor.register("a", 32 * MIB, seed=1)
    theirs = other.register("b", 10 * MIB, seed=2)
    other.use("b")
    poor.allow_descriptors(10)
    said = failure("SessionFenced", poor.acquire, "a")
    assert "`ulimit -n`" in said
    daemon.await_gone(poor)
    assert other.use("b")[1] == theirs
    other.disconnect()
    poor.disconnect()
    assert daemon.status().quarantined_bytes == 0
    assert poor.look("a")[1] == mine


def test_a_worker_that_may_have_too_few_descriptors_is_warned(world: World) -> None:
    _, worker = world.alone()
    worker.ping()
    worker.allow_descriptors(100)
    expected = worker.register("a", 4 * MIB)
    assert "for the 8 chunks of cuda:0" in worker.log
    assert "set `ulimit -n " in worker.log
    assert worker.use("a")[1] == expected


def test_without_the_daemon_s_folder_it_is_said_what_to_mount(world: World) -> None:
    folder = world.worker(world.daemon())._log.parent / "nowhere"
    done = run_python("import sys, swapd_client; swapd_client.connect(sys.argv[1])", folder)
    said = done.stderr.splitlines()[-1]
    assert f"NotRunning: no swapd at {folder} (No such file or directory)" in said
    assert f"In a container, mount the daemon's folder (docker run -v FOLDER:{folder}" in said


# --- others on the GPU -------------------------------------------------------------------


def test_memory_that_others_have_eaten_is_asked_for_until_it_is_back(world: World) -> None:
    daemon, worker, other = world.pair()
    expected = worker.register("a", 4 * MIB, seed=1)
    theirs = other.register("b", 10 * MIB, seed=2)
    worker.use("a")
    worker.acquire_workspace(12 * MIB)
    with world.fake.occupied(world.fake.free_bytes(), pid=4000001, name="ollama"):
        worker.release("workspace")
        waiting = other.start("use", "b")
        daemon.await_record("Acquire", names=("b",))
        while not (notes := daemon.status().notes):
            pass  # the daemon asks the driver in the background
        assert worker.use("a")[1] == expected
        with pytest.raises(WorkerError, match="12 MiB lent"):
            worker.acquire("b", timeout=0.01)
    assert waiting.result()[1] == theirs
    (note,) = notes
    assert note.startswith("workspace ")
    assert (
        ": 12 MiB are not back yet; swapd asks again: cuda:0 (Fake GPU 0) is out of memory " in note
    )
    assert "0 B are free, and ollama (process 4000001) has" in note
    assert daemon.status().notes == ()


def test_nothing_is_left_of_what_failed(world: World) -> None:
    """Neither memory nor descriptors, in the daemon or in the workers."""
    daemon, worker, writer = world.pair("worker", "writer")
    worker.register("a", 10 * MIB)
    writer.register("w", 10 * MIB, mutable=True)

    def fail_in_every_way() -> None:
        once(world, daemon, IN)
        failure("DeviceFailed", worker.acquire, "a")
        writer.use_to_write("w", 1)
        once(world, daemon, OUT)
        failure("DeviceFailed", worker.acquire, "a")
        once(world, daemon, "cuMemUnmap")
        failure("DeviceFailed", worker.acquire_workspace, 16 * MIB)
        worker.use("a")
        writer.use("w")

    fail_in_every_way()
    fail_in_every_way()
    before = descriptors(daemon.pid), worker.count_descriptors(), writer.count_descriptors()
    fail_in_every_way()
    while len(descriptors(daemon.pid)) > len(before[0]):
        pass  # some were closing before, or still are
    assert (worker.count_descriptors(), writer.count_descriptors()) == before[1:]
    assert world.fake.held_bytes() == daemon.status().budget_bytes
