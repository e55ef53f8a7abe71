"""Guarantee 5, of memory that a process might still write to: others lack it no longer than that.

When a session ends and its process lives on, the daemon withholds the chunks of its mutable
components. They are free again as soon as the process says that it has let go, as `close` does.
"""

import os
from pathlib import Path

import pytest

from swapd.shared import protocol
from tests.guarantees.harness import MIB, Daemon, RawSession, Worker, WorkerError, World


def fence(daemon: Daemon, worker: Worker, other: Worker) -> None:
    """End the session of `worker`, which has an idle, resident, mutable component."""
    worker.stop()
    with pytest.raises(WorkerError, match="that never leave"):
        other.acquire("all")
    worker.go_on()
    assert "SessionFenced" in worker.await_end()


def quarantined(daemon: Daemon) -> int:
    return daemon.status().quarantined_bytes


def watched(daemon: Daemon) -> int:
    """The number of processes whose end the daemon waits for."""
    return sum("pidfd" in os.readlink(fd) for fd in Path(f"/proc/{daemon.pid}/fd").iterdir())


def test_five_lives_of_a_process_that_is_fenced_strand_nothing(world: World) -> None:
    daemon = world.daemon(ack_timeout=0.2)
    worker, other = world.workers(daemon, "worker", "other")
    everything = other.register("all", 16 * MIB, seed=9)
    for life in range(5):
        m = worker.register("m", 4 * MIB, seed=life, mutable=True)
        assert worker.use("m")[1] == m
        fence(daemon, worker, other)
        assert quarantined(daemon) == 4 * MIB
        worker.disconnect()
        assert quarantined(daemon) == 0
        assert worker.look("m")[1] == m
    assert other.use("all")[1] == everything


def test_a_process_that_has_let_go_is_watched_no_longer(world: World) -> None:
    daemon = world.daemon(ack_timeout=0.2)
    worker, other = world.workers(daemon, "worker", "other")
    other.register("all", 16 * MIB, seed=9)
    worker.register("m", 4 * MIB, mutable=True)
    worker.use("m")
    before = watched(daemon)
    fence(daemon, worker, other)
    while watched(daemon) == before:
        """Its session ends in steps."""
    worker.disconnect()
    assert quarantined(daemon) == 0
    while watched(daemon) > before:
        """Its watch ends a moment later."""


def test_what_was_written_before_the_fence_is_the_workers_own_when_it_lets_go(
    world: World,
) -> None:
    daemon = world.daemon(ack_timeout=0.2)
    worker, other = world.workers(daemon, "worker", "other")
    other.register("all", 16 * MIB, seed=9)
    worker.register("m", 4 * MIB, mutable=True)
    worker.acquire("m")
    written = worker.write("m", 5)
    worker.release("m")
    fence(daemon, worker, other)
    worker.disconnect()
    other.use("all")
    assert worker.look("m")[1] == written


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "not kept"])
def test_a_client_that_closes_while_others_hold_what_it_may_write_to_lets_go(
    world: World, keep: bool
) -> None:
    daemon = world.daemon()
    worker, other = world.workers(daemon, "worker", "other")
    everything = other.register("all", 16 * MIB, seed=9)
    m = worker.register("m", 4 * MIB, seed=1, mutable=True)
    worker.use("m")
    other.acquire("m")
    worker.disconnect(keep=keep)
    assert quarantined(daemon) == 0
    other.release("m")
    assert other.use("all")[1] == everything
    if keep:
        assert worker.look("m")[1] == m


@pytest.mark.parametrize("again", [False, True], ids=["gone", "connected again"])
def test_a_client_that_is_dropped_after_its_session_lets_go(world: World, again: bool) -> None:
    daemon = world.daemon(ack_timeout=0.2)
    worker, other = world.workers(daemon, "worker", "other")
    everything = other.register("all", 16 * MIB, seed=9)
    m = worker.register("m", 4 * MIB, seed=1, mutable=True)
    worker.use("m")
    fence(daemon, worker, other)
    assert quarantined(daemon) == 4 * MIB
    worker.drop_client()
    if again:
        worker.ping()
    daemon.await_record("UnmapAck")
    assert quarantined(daemon) == 0
    assert worker.look("m")[1] == m
    assert other.use("all")[1] == everything


def test_a_client_that_is_dropped_before_its_session_is_fenced_lets_go(world: World) -> None:
    daemon = world.daemon(ack_timeout=0.2)
    worker, other = world.workers(daemon, "worker", "other")
    other.register("all", 16 * MIB, seed=9)
    worker.register("m", 4 * MIB, mutable=True)
    worker.use("m")
    worker.drop_client_that_closes_late()
    worker.stop()
    with pytest.raises(WorkerError, match="that never leave"):
        other.acquire("all")
    worker.go_on()
    worker.let_client_close()
    daemon.await_record("UnmapAck")
    other.use("all")


def test_nobody_lets_go_for_another(world: World) -> None:
    daemon = world.daemon(ack_timeout=0.2)
    worker, other = world.workers(daemon, "worker", "other")
    other.register("all", 16 * MIB, seed=9)
    worker.register("m", 4 * MIB, mutable=True)
    worker.use("m")
    token = bytes.fromhex(worker.token())
    fence(daemon, worker, other)
    with RawSession(daemon.folder) as stranger:
        for said in (token, bytes(16), b"", token + b"\0", stranger.token):
            with RawSession(daemon.folder, hello=False, rpc=False) as liar:
                liar.tell(protocol.SessionUnmapped(said))
                assert liar.end() == []
        assert stranger.end() == []  # the lie changed nothing for its own session
    assert quarantined(daemon) == 4 * MIB
    other.let_go(token.hex())  # another process of the same user, which knows the token
    assert quarantined(daemon) == 4 * MIB
    worker.disconnect()
    assert quarantined(daemon) == 0


def test_a_session_that_goes_on_is_not_ended_by_another_process(world: World) -> None:
    daemon = world.daemon()
    worker, other = world.workers(daemon, "worker", "other")
    a = worker.register("a", 4 * MIB, seed=1)
    other.let_go(worker.token())
    assert worker.use("a")[1] == a


def test_the_end_of_the_process_still_ends_it(world: World) -> None:
    daemon = world.daemon(ack_timeout=0.2)
    worker, other = world.workers(daemon, "worker", "other")
    other.register("all", 16 * MIB, seed=9)
    worker.register("m", 4 * MIB, mutable=True)
    worker.use("m")
    fence(daemon, worker, other)
    worker.kill()
    daemon.await_record("ProcessExited")
    assert quarantined(daemon) == 0
    other.use("all")
