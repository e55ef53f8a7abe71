"""Guarantee 6, of the daemon's own end: it waits to save bytes, and for nothing else."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import save_file

from swapd.core.events import SessionRequest
from swapd.daemon.host_copies import NAME
from swapd.log.reader import read
from swapd.log.records import parse
from swapd.shared import protocol
from swapd_client import connect
from swapd_client.weights import safetensors
from tests.contents import bytes_of
from tests.guarantees import held_save
from tests.guarantees.harness import MIB, Daemon, RawSession, Worker, World
from tests.guarantees.keeping import await_held, await_no_keeper, keep, serve, values
from tests.guarantees.worker import digest


def ended_after(daemon: Daemon) -> float:
    """The time until it has ended in order."""
    started = time.monotonic()
    assert daemon.wait() == 0
    assert not list(daemon.folder.glob("*.sock"))
    return time.monotonic() - started


def test_copies_that_have_not_begun_are_dropped(world: World) -> None:
    """15 prefetches are queued: the daemon waits for one, not for 15."""
    daemon = world.daemon(budget="32MiB", bandwidth="1MB/s", stop_timeout=0.5)
    with connect(daemon.folder) as client:
        for number in range(15):
            client.register(f"c{number}", {"data": bytes_of(f"c{number}", 2 * MIB)})
            client.prefetch(f"c{number}")
        daemon.await_record("CopyIn", name="c14")
        daemon.terminate()
        one_copy_s = 2 * MIB / 1e6
        assert ended_after(daemon) < 0.5 + 4 * one_copy_s


def test_a_load_that_nobody_waits_for_is_not_waited_for(world: World) -> None:
    daemon = world.daemon(budget="32MiB", bandwidth="1MB/s", stop_timeout=600)
    with connect(daemon.folder) as client:
        for number in range(3):
            client.register(f"c{number}", {"data": bytes_of(f"c{number}", 2 * MIB)})
            client.prefetch(f"c{number}")
        daemon.await_record("CopyIn", name="c2")
        daemon.terminate()
        ended_after(daemon)


def stopped_while_it_saves(
    world: World, daemon: Daemon, by: signal.Signals = signal.SIGTERM
) -> tuple[Worker, str]:
    """Tell a daemon to stop as it writes bytes back that are nowhere else; their worker, which
    stands still, and what it wrote."""
    owner, other = world.workers(daemon, "owner", "other")
    owner.register("m", 8 * MIB, mutable=True)
    other.register("b", 16 * MIB)
    owner.acquire("m")
    written = owner.write("m", 5)
    owner.release("m")
    other.start("acquire", "b")
    daemon.await_record("CopyOut", name="m")
    owner.stop()
    os.kill(daemon.pid, by)
    return owner, written


def check_saved(owner: Worker, written: str) -> None:
    opened = [fd for fd in Path(f"/proc/{owner.pid}/fd").iterdir() if NAME in str(fd.readlink())]
    assert [digest(bytearray(host_copy.read_bytes())) for host_copy in opened] == [written]
    owner.go_on()
    owner.await_end()
    owner.disconnect()
    assert owner.look("m")[1] == written


def test_what_is_nowhere_else_is_saved_however_short_the_time(world: World) -> None:
    daemon = world.daemon(bandwidth="8MB/s", stop_timeout=0.01)
    owner, written = stopped_while_it_saves(world, daemon)
    ended_after(daemon)
    check_saved(owner, written)


def test_told_to_stop_as_it_upgrades_it_saves_too_and_leaves_no_keeper(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "SETTLED_NS", -(10**9))
    save_file({"x": values("talker")}, tmp_path / "talker")
    door = held_save.door(world.folder / "d")
    os.mkfifo(door)
    daemon = serve(world, program="tests.guarantees.held_save")
    keep(daemon, {"talker": tmp_path / "talker"}, "talker")
    await_held(daemon, 1)
    owner, written = stopped_while_it_saves(world, daemon, signal.SIGUSR2)
    while "upgrading" not in daemon.log:
        pass
    daemon.terminate()
    time.sleep(0.2)
    assert daemon.running, daemon.log
    with door.open("w"):
        ended_after(daemon)
    assert "told twice" not in daemon.log
    check_saved(owner, written)
    await_no_keeper(daemon)


def test_told_twice_it_waits_for_no_copy_and_no_weight_is_lost(world: World) -> None:
    daemon = world.daemon(bandwidth="0.5MB/s", stop_timeout=600)
    owner = world.worker(daemon, "owner")
    a = owner.register("a", 16 * MIB, seed=1)
    owner.acquire("a", early=True)  # told once, the daemon waits for the end of this lease
    daemon.terminate()
    daemon.await_record("Stopping")
    daemon.terminate()
    assert ended_after(daemon) < 16
    assert "told twice" in daemon.log
    owner.disconnect()
    assert owner.look("a")[1] == a


def steps_of_an_end(world: World, components: int) -> int:
    """Calls of a daemon from its goodbye on, with a lease held beyond the timeout."""
    daemon = world.daemon(
        program="tests.guarantees.counted_stop", budget="512MiB", stop_timeout=0.01
    )
    with connect(daemon.folder) as client:
        for number in range(components):
            client.register(f"c{number}", {"data": bytearray(4096)}, mutable=bool(number % 2))
        with client.acquire(*(f"c{number}" for number in range(components))):
            daemon.await_record("Grant")  # no record of before is left to be sent
            daemon.terminate()
            ended_after(daemon)
    assert "--stop-timeout (0.01 s) is over" in daemon.log
    return int(daemon.log.splitlines()[-1])


def test_the_end_takes_no_step_for_each_component(world: World) -> None:
    """On a busy machine a daemon has a small share of the processors, so its steps take long."""
    few, many = steps_of_an_end(world, 10), steps_of_an_end(world, 200)
    assert many < 1.2 * few


def test_nobody_is_served_after_the_goodbye(world: World) -> None:
    """The save takes as long as it takes; what clients ask meanwhile does not delay it."""
    door = held_save.door(world.folder / "d")
    os.mkfifo(door)
    daemon = world.daemon(program="tests.guarantees.held_save", stop_timeout=0.01)
    with RawSession(daemon.folder) as raw:
        raw.ask(protocol.StatusRequest(raw.next_id()))
        owner, written = stopped_while_it_saves(world, daemon)
        assert isinstance(raw.end()[-1], protocol.Goodbye)
        raw.rpc.send(protocol.encode(protocol.Prefetch(raw.next_id(), ("b",))))
        with door.open("w"):
            ended_after(daemon)
        said = [parse(line.raw).event for line in read(daemon.swap_log)]
        assert raw.session not in [one.session for one in said if isinstance(one, SessionRequest)]
    owner.go_on()
    owner.await_end()
    owner.disconnect()
    assert owner.look("m")[1] == written


# --- the swap log --------------------------------------------------------------------------


@contextmanager
def hung(path: Path) -> Iterator[int]:
    """A full pipe as the log: it takes a few records and then no more; its reading end."""
    os.mkfifo(path)
    end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        yield end
    finally:
        os.close(end)


def test_a_swap_log_that_takes_nothing_keeps_nobody_waiting(world: World) -> None:
    path = world.folder / "log"
    with hung(path):
        daemon = world.daemon(swap_log=path)
        worker = world.worker(daemon, "worker")
        a = worker.register("a", 2 * MIB, seed=1)
        with RawSession(daemon.folder) as raw:
            for _ in range(100):  # more than a pipe takes
                raw.ask(protocol.Prefetch(raw.next_id(), ("a",) * 1000))
        assert worker.use("a")[1] == a
        daemon.terminate()
        ended_after(daemon)
        assert "the disk hangs" in daemon.log
