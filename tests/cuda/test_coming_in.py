"""The client maps chunks during the copy, and no access reaches a chunk before its bytes."""

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fakecuda
from tests.cuda.gpu_world import MIB, Daemon, Worker, WorkerError, World, failure

COPY_IN = "cuMemcpyHtoDAsync"
WORK = "cuMemcpyDtoDAsync_v2"
ACCESS = "cuMemSetAccess"
SEGMENTS = 4


@pytest.fixture
def calls(
    fake: fakecuda.Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator["Calls"]:
    """The driver calls of processes that start later: so request this fixture first."""
    fifo = tmp_path / "calls"
    os.mkfifo(fifo)
    # with a writer here, the end of a process is no end of file
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    monkeypatch.setenv("FAKECUDA_TRACE", str(fifo))
    yield Calls(reader)
    os.close(reader)


class Calls:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self._lines: list[list[str]] = []

    def until(self, pid: int, function: str, times: int, note: str = "") -> None:
        """Read until a process has made a call that often."""
        while self.count(pid, function, note) < times:
            assert select.select([self._fd], [], [], 60)[0], f"{function} was not called"
            self._rest += os.read(self._fd, 1 << 16)
            *whole, self._rest = self._rest.split(b"\n")
            self._lines += [line.decode().split() for line in whole]

    def count(self, pid: int, function: str, note: str = "") -> int:
        wanted = [function, *([note] if note else [])]
        return sum(1 for line in self._lines if line[0] == str(pid) and line[2:] == wanted)

    def clear(self) -> None:
        self._lines.clear()


def test_the_calls_of_the_driver_are_made_while_the_bytes_come(calls: Calls, world: World) -> None:
    daemon, worker = world.alone()
    expected = worker.register("a", 8 * MIB, seed=1)
    # of four pieces, one for each chunk, three arrive
    world.fake.faults(f"{COPY_IN} hold async after=3 pid={daemon.pid}")
    waiting = worker.start("acquire", "a")
    calls.until(daemon.pid, f"{COPY_IN}_v2", 1, "held")
    calls.until(worker.pid, "cuMemMap", 4)
    calls.until(worker.pid, "cuMemSetAccess", 2)  # two chunks, and one more
    assert not waiting.done
    calls.clear()
    world.go_on(waiting)
    calls.until(worker.pid, "cuMemSetAccess", 1)
    assert worker.look("a")[1] == expected
    assert calls.count(worker.pid, "cuMemMap") == 0
    assert calls.count(worker.pid, "cuMemSetAccess") == 1, "what was left when all had come"
    worker.release("a")


@pytest.mark.parametrize(("chunk", "faults"), [(0, False), (1, False), (2, True), (3, True)])
def test_no_byte_can_be_read_that_has_not_come(
    calls: Calls, world: World, chunk: int, *, faults: bool
) -> None:
    """Another component's bytes are still there."""
    daemon, worker, other = world.pair(budget="8MiB", isolation="relaxed")
    worker.register("a", 8 * MIB, seed=1)
    other.register("secret", 8 * MIB, seed=2)
    other.use("secret")
    world.fake.faults(f"{COPY_IN} hold async after=2 pid={daemon.pid}")
    waiting = worker.start("acquire", "a")
    calls.until(worker.pid, "accessible", 1)
    if faults:
        with pytest.raises(WorkerError, match="ILLEGAL_ADDRESS"):
            worker.start("peek_at", "a", chunk * 2 * MIB, lane="thief").result()
        worker.kill()
    else:
        worker.start("peek_at", "a", chunk * 2 * MIB, lane="thief").result()
    world.go_on()
    if not faults:
        waiting.result()
        worker.release("a")


def test_a_copy_that_fails_leaves_nothing_mapped_and_the_next_one_comes_in(
    calls: Calls, world: World
) -> None:
    daemon, worker = world.alone()
    expected = worker.register("a", 8 * MIB, seed=1)
    world.fake.faults(f"{COPY_IN} 2 after=2 times=1 pid={daemon.pid}")
    assert "was not loaded" in failure("DeviceFailed", worker.acquire, "a")
    calls.until(worker.pid, "cuMemUnmap", 1)
    assert daemon.component("a").state == "absent"
    assert worker.use("a")[1] == expected


def test_an_acquire_that_runs_out_of_time_in_the_middle_holds_nothing(world: World) -> None:
    daemon, worker = world.alone()
    expected = worker.register("a", 8 * MIB, seed=1)
    world.hold(COPY_IN, daemon)
    failure("Timeout", worker.acquire, "a", timeout=0.2)
    assert daemon.component("a").leases == 0
    world.go_on()
    assert worker.use("a")[1] == expected


def test_what_is_waited_for_counts_as_waiting(calls: Calls, world: World) -> None:
    daemon, worker = world.alone()
    worker.register("a", 8 * MIB, seed=1)
    world.hold(COPY_IN, daemon)
    waiting = worker.start("acquire", "a")
    daemon.watch.until("Grant")
    calls.until(worker.pid, "cuMemMap", 4)  # it has begun to wait
    world.go_on()
    granted = waiting.result()
    assert granted["loaded"]
    assert granted["waited_s"] > 0


def test_a_daemon_that_dies_meanwhile_ends_the_wait(world: World) -> None:
    daemon, worker = world.alone()
    expected = worker.register("a", 8 * MIB, seed=1)
    worker.register("b", 2 * MIB)
    worker.use("b")
    world.hold(COPY_IN, daemon)
    waiting = worker.start("acquire", "a")
    daemon.watch.until("Grant")
    daemon.kill()
    failure("DaemonGone", waiting.result)
    world.go_on()
    worker.disconnect()
    assert worker.look("a")[1] == expected


# --- early leases ------------------------------------------------------------------------


def acquire_early(
    world: World, isolation: str = "strict", **options: object
) -> tuple[Daemon, Worker, list[str]]:
    """A lease on `a`, with a chunk for each segment, of which two arrive until `world.go_on`."""
    daemon, worker = world.alone(isolation=isolation)
    digests: list[str] = worker.register_in_segments("a", 2 * MIB, SEGMENTS, **options)
    world.fake.faults(f"{COPY_IN} hold async after=2 pid={daemon.pid}")
    worker.acquire("a", early=True)
    return daemon, worker, digests


def test_an_early_grant_makes_nothing_accessible_and_a_wait_what_it_waits_for(
    calls: Calls, world: World
) -> None:
    _, worker, digests = acquire_early(world)
    for number, (segment, accesses) in enumerate(((0, 1), (0, 1), (2, 2), (1, 2), (3, 3))):
        worker.work_on_segment("a", segment, stream=f"s{number}")
        calls.until(worker.pid, WORK, number + 1)
        assert calls.count(worker.pid, ACCESS) == accesses
    assert calls.count(worker.pid, "cuMemMap") == SEGMENTS
    world.go_on()
    assert [worker.result(stream=f"s{number}") for number in (0, 3, 2, 4)] == digests
    worker.release("a")


@pytest.mark.parametrize(("segment", "faults"), [(0, False), (1, True)])
def test_under_an_early_lease_nothing_is_accessible_that_was_not_waited_for(
    world: World, segment: int, *, faults: bool
) -> None:
    daemon, worker, _ = acquire_early(world)
    worker.wait_for("a", 0)
    world.go_on()
    daemon.await_record("CopiedIn")
    if faults:
        with pytest.raises(WorkerError, match="ILLEGAL_ADDRESS"):
            worker.peek_at("a", segment * 2 * MIB)
        worker.kill()
    else:
        worker.peek_at("a", segment * 2 * MIB)
        worker.release("a")


def test_a_lease_that_waited_for_some_segments_gives_them_back(world: World) -> None:
    daemon, worker, _ = acquire_early(world)
    worker.wait_for("a", 0)
    world.go_on()
    worker.release("a")
    assert daemon.component("a").leases == 0
    with pytest.raises(WorkerError, match="ILLEGAL_ADDRESS"):
        worker.peek("a")
    worker.kill()


@pytest.mark.parametrize("isolation", ["strict", "relaxed"])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("comes", [False, True])
def test_after_an_early_lease_all_is_accessible_for_one_that_is_not(
    world: World, isolation: str, *, waits: bool, comes: bool
) -> None:
    daemon, worker, digests = acquire_early(world, isolation)
    if waits:
        worker.wait_for("a", 1)
    if comes:
        world.go_on()
        daemon.await_record("CopiedIn")
    worker.release("a")
    acquiring = worker.start("acquire", "a")
    if not comes:
        world.go_on()
    acquiring.result()
    assert worker.see("a", SEGMENTS) == digests
    worker.release("a")


def test_a_wait_for_all_of_it_makes_all_of_it_accessible(calls: Calls, world: World) -> None:
    _, worker, digests = acquire_early(world)
    world.go_on()
    worker.wait_for("a")
    assert worker.see("a", SEGMENTS) == digests
    worker.acquire("a", lease="again", early=True)
    assert worker.see("a", SEGMENTS) == digests
    calls.until(worker.pid, "cuMemMap", SEGMENTS)
    assert calls.count(worker.pid, ACCESS) == 1
    worker.release("a")
    worker.release("again")


def test_what_has_come_before_an_early_grant_is_accessible_at_once(world: World) -> None:
    _, worker = world.alone()
    digests = worker.register_in_segments("a", 2 * MIB, SEGMENTS)
    worker.acquire("a")
    worker.release("a")
    worker.acquire("a", early=True)
    assert worker.see("a", SEGMENTS) == digests
    worker.release("a")


def test_each_part_of_a_family_is_made_accessible(world: World) -> None:
    daemon, worker = world.alone()
    world.hold(COPY_IN, daemon)
    digests = worker.register_blocks(2, 4 * MIB)
    worker.acquire("m", early=True)
    world.go_on()
    worker.wait_for("m")
    assert worker.blocks() == digests
    worker.release("m")


def test_an_acquire_that_fails_takes_nothing_from_an_early_lease(world: World) -> None:
    _, worker, digests = acquire_early(world)
    worker.wait_for("a", 0)
    failure("Timeout", worker.acquire, "a", lease="other", timeout=0.2)
    worker.peek("a")
    world.go_on()
    worker.wait_for("a", SEGMENTS - 1)
    assert worker.see("a", SEGMENTS) == digests
    worker.release("a")


def test_what_an_early_lease_wrote_outlives_the_daemon(world: World) -> None:
    daemon, worker, digests = acquire_early(world, mutable=True)
    worker.wait_for("a", 0)
    digests[0] = worker.write_segment("a", 0, seed=9)
    world.go_on()
    daemon.await_record("CopiedIn")
    daemon.kill()
    worker.await_end()
    worker.disconnect()
    assert worker.see("a", SEGMENTS) == digests


def test_a_segment_that_cannot_be_made_accessible_is_said_and_may_be_waited_for_again(
    world: World,
) -> None:
    _, worker, digests = acquire_early(world)
    world.go_on()
    worker.wait_for("a", 0)
    world.fake.faults(f"{ACCESS} 2 times=1 pid={worker.pid}")
    assert "The host copy is intact" in failure("DeviceFailed", worker.wait_for, "a", 3)
    worker.wait_for("a", 3)
    assert worker.see("a", SEGMENTS) == digests
    worker.release("a")


def test_work_on_a_segment_ends_before_its_chunks_go_after_a_failed_copy(world: World) -> None:
    daemon, worker = world.alone(budget="32MiB")
    worker.register_in_segments("a", 6 * MIB, SEGMENTS)
    # the daemon's first piece is held back, and the others fail
    refusal = f"{COPY_IN} 1 pid={daemon.pid}"
    world.fake.faults(f"{COPY_IN} hold times=1 async pid={daemon.pid}", refusal)
    worker.acquire("a", early=True)
    worker.work_on_segment("a", 0)
    world.fake.faults(refusal)
    worker.result()  # any bytes: the stream went on, and has not faulted
    with pytest.raises(WorkerError, match="was not loaded"):
        worker.release("a")
