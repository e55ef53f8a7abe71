"""The daemon's own GPU work ends for good, by an error that its context does not survive.

The daemon goes on: it reports the error by name, grants components on the GPU, refuses all others
with the remedy, loses nothing silently, and stops on a signal.
"""

import pytest

from tests.cuda.gpu_world import MIB, Daemon, Worker, World, failure

LOST = "cuda:0 is lost: CUDA_ERROR_LAUNCH_FAILED (719)"
ADVICE = "until swapd is restarted"

#: The driver takes the copy, and the wait for it fails; or the driver refuses the copy.
FAULTS = ["cuMemcpyHtoDAsync 719 times=1 async", "cuMemcpyHtoDAsync 719 times=1 sticky"]


def lose(world: World, daemon: Daemon, worker: Worker, name: str, fault: str = FAULTS[0]) -> None:
    """Have the daemon's GPU work end in the load of `name`."""
    world.fake.faults(f"{fault} pid={daemon.pid}")
    said = failure("DeviceFailed", worker.acquire, name)
    world.fake.faults()
    assert LOST in said
    assert "it is still in host memory" in said
    assert ADVICE in said


def says_it_is_lost(daemon: Daemon) -> bool:
    (note,) = daemon.status().notes
    while note not in daemon.log:
        pass  # a thread of its own writes it
    assert daemon.log.count(note) == 1, "said once, in the same words"
    return note.startswith(LOST) and ADVICE in note


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_on_the_gpu_is_granted_and_the_rest_refused_by_the_errors_name(
    world: World, fault: str
) -> None:
    daemon, holder, other = world.pair("holder", "other", budget="24MiB")
    expected = {name: holder.register(name, 6 * MIB, seed=i) for i, name in enumerate("ab")}
    for name in expected:
        holder.use(name)
    loads = other.register("c", 8 * MIB, seed=5)
    other.register("d", 14 * MIB)
    holder.acquire("a")
    holder.work("a")
    lose(world, daemon, other, "c", fault)
    assert says_it_is_lost(daemon)
    assert holder.result() == expected["a"], "it computes on"
    holder.release("a")
    for name in expected:
        assert holder.use(name)[1] == expected[name]
    for name in "cd":
        said = failure("DeviceFailed", other.acquire, name)
        assert said.startswith(f"{name} cannot be granted: {LOST}")
    failure("DeviceFailed", other.acquire_workspace, 2 * MIB)
    failure("DeviceFailed", other.prefetch, "c")
    assert [daemon.component(name).state for name in "abc"] == ["idle", "idle", "absent"]
    late = world.worker(daemon, "late")
    late.register("e", 2 * MIB)
    assert LOST in failure("DeviceFailed", late.acquire, "e")
    other.disconnect()
    assert other.look("c")[1] == loads, "its weights are where they were"
    holder.disconnect()
    assert {name: holder.look(name)[1] for name in expected} == expected
    daemon.terminate()
    assert daemon.wait() == 0


def test_what_cannot_be_written_back_stays_and_is_the_workers(world: World) -> None:
    daemon, writer, other = world.pair("writer", "other", budget="24MiB")
    writer.register("written", 6 * MIB, mutable=True)
    writer.acquire("written")
    written = writer.write("written", 9)
    other.register("c", 8 * MIB)
    lose(world, daemon, other, "c")
    writer.release("written")
    said = failure("DeviceFailed", writer.unregister, "written")
    assert "it is still on the device" in said
    assert LOST in said
    assert LOST in daemon.await_record("CopyFailed").why
    writer.acquire("written")
    assert writer.look("written")[1] == written
    writer.release("written")
    writer.disconnect()
    assert writer.look("written")[1] == written


def test_a_write_back_that_loses_the_gpu_leaves_the_bytes_to_their_worker(world: World) -> None:
    daemon, writer, other = world.pair("writer", "other")
    writer.register("written", 10 * MIB, mutable=True)
    written = writer.use_to_write("written", 9)
    other.register("c", 10 * MIB)
    world.fake.faults(f"cuMemcpyDtoHAsync 719 async pid={daemon.pid}")
    failure("DeviceFailed", other.acquire, "c")
    world.fake.faults()
    assert says_it_is_lost(daemon)
    assert writer.use("written")[1] == written
    daemon.terminate()
    assert daemon.wait() == 0
    writer.await_end()
    writer.disconnect()
    assert writer.look("written")[1] == written


def test_after_a_restart_the_same_weights_are_served_again(world: World) -> None:
    daemon, worker = world.alone()
    expected = worker.register("a", 10 * MIB, seed=1)
    lose(world, daemon, worker, "a")
    daemon.terminate()
    assert daemon.wait() == 0
    worker.await_end()
    worker.disconnect()
    again = world.daemon()
    worker.register("a", 10 * MIB, seed=1)
    worker.acquire("a")
    assert worker.look("a")[1] == expected
    assert again.status().notes == ()


def test_waits_for_what_was_to_come_in_early_end(world: World) -> None:
    daemon, worker = world.alone()
    worker.register_in_segments("a", 2 * MIB, 4)
    world.hold("cuMemcpyHtoDAsync", daemon)
    worker.acquire("a", early=True)
    worker.work_on_segment("a", 3)
    world.fake.faults(f"cuEventSynchronize 702 sticky pid={daemon.pid}")
    worker.result()  # any bytes: the stream went on
    said = failure("DeviceFailed", worker.wait_for, "a", 3)
    assert "CUDA_ERROR_LAUNCH_TIMEOUT (702)" in said
    assert ADVICE in said
