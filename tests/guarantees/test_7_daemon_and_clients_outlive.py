"""Guarantee 7: the daemon outlives its clients, and its clients outlive it."""

import asyncio

import pytest

from swapd_client import DaemonGone, connect_async
from tests.contents import bytes_of
from tests.guarantees.harness import MIB, WorkerError, World

# --- the daemon is killed ----------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["strict", "relaxed"])
def test_workers_go_on_computing_on_what_they_hold(world: World, isolation: str) -> None:
    daemon = world.daemon(isolation=isolation)
    holder, other = world.workers(daemon, "holder", "other")
    a = holder.register("a", 8 * MIB, seed=1)
    b = holder.register("b", 4 * MIB, seed=2)
    other.register("c", 12 * MIB, seed=3)
    holder.use("b")
    holder.acquire("a")
    before = holder.look("a")
    waiting = other.start("acquire", "c")
    daemon.await_record("Waiting", names=("c",))
    parked = other.start("acquire", "later", await_registration=True, lane="second")
    daemon.await_record("Waiting", names=("later",))

    daemon.kill()
    for pending in (waiting, parked):
        with pytest.raises(WorkerError, match="the daemon is gone") as gone:
            pending.result()
        assert gone.value.kind == "DaemonGone"
    holder.await_end()
    assert holder.look("a") == before == [before[0], a]
    for use in (("acquire", "b"), ("prefetch", "b"), ("unregister", "b"), ("register", "d", MIB)):
        with pytest.raises(WorkerError, match="Leased memory stays mapped") as gone:
            holder.start(*use).result()
        assert gone.value.kind == "DaemonGone"
    holder.release("a")
    assert holder.look("a") == before

    holder.disconnect()
    assert holder.look("a") == before
    assert holder.look("b")[1] == b


def test_after_a_restart_workers_come_back_with_the_weights_they_kept(world: World) -> None:
    daemon = world.daemon()
    one, two = world.workers(daemon, "one", "two")
    a = one.register("a", 8 * MIB, seed=1)
    two.register("m", 12 * MIB, mutable=True)
    one.use("a")
    two.acquire("m")
    written = two.write("m", 5)
    daemon.kill()
    again = world.daemon()
    for worker, name, options in ((one, "a", {}), (two, "m", {"mutable": True})):
        worker.await_end()
        worker.disconnect()
        worker.register_again(name, **options)
    for _ in range(3):
        assert one.use("a")[1] == a
        assert two.use("m")[1] == written
    assert again.status().evictions >= 4


def test_a_registration_that_the_daemons_death_ends_leaves_its_source(world: World) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    a = worker.register("a", 8 * MIB, seed=1)
    worker.disconnect()
    worker.ping()
    stalled = worker.start("stall_in_register", "b", 8 * MIB, lane="second")
    worker.await_event()
    daemon.kill()
    assert "DaemonGone" in worker.await_end()
    with pytest.raises(WorkerError, match="DaemonGone"):
        worker.register_again("a")
    assert worker.look("a")[1] == a
    assert not stalled.done


async def test_async_waits_end_with_the_daemon(world: World) -> None:
    daemon = world.daemon()
    holder = world.worker(daemon, "holder")
    holder.register("h", 16 * MIB)
    holder.acquire("h")
    client = await connect_async(daemon.folder, label="client", reconnect=0)
    part = await client.register("a", {"data": bytearray(b"x" * 8 * MIB)})

    async def acquire(name: str, *, await_registration: bool) -> None:
        await client.acquire(name, await_registration=await_registration)

    loop = asyncio.get_running_loop()
    waiting = [
        loop.create_task(acquire(name, await_registration=await_registration), name=name)
        for name, await_registration in (("a", False), ("a", False), ("later", True))
    ]
    for _ in waiting:
        await asyncio.to_thread(daemon.await_record, "Waiting")
    await asyncio.to_thread(daemon.kill)
    for task in waiting:
        with pytest.raises(DaemonGone, match="the daemon is gone"):
            await task
    with pytest.raises(DaemonGone):
        await client.acquire("a")
    with pytest.raises(DaemonGone):
        await client.status()
    await client.close()
    assert bytes(part.view("data")[:3]) == b"xxx"


# --- the daemon stops --------------------------------------------------------------------


def test_stopping_refuses_who_waits_and_waits_for_who_holds(world: World) -> None:
    daemon = world.daemon(stop_timeout=60)
    holder, other = world.workers(daemon, "holder", "other")
    a = holder.register("a", 8 * MIB, seed=1)
    m = holder.register("m", 2 * MIB, seed=2, mutable=True)
    other.register("b", 12 * MIB)
    holder.use("m")
    holder.acquire("a")
    waiting = other.start("acquire", "b")
    daemon.await_record("Waiting", names=("b",))
    parked = other.start("acquire", "later", await_registration=True, lane="second")
    daemon.await_record("Waiting", names=("later",))

    daemon.terminate()
    for pending in (waiting, parked):
        with pytest.raises(WorkerError, match="swapd is stopping") as refused:
            pending.result()
        assert refused.value.kind == "DaemonGone"
    with pytest.raises(WorkerError, match="swapd is stopping"):
        other.acquire("a")
    with pytest.raises(WorkerError, match="swapd is stopping"):
        other.register("e", MIB)
    assert holder.look("a")[1] == a
    assert daemon.running

    holder.release("a")
    assert daemon.wait() == 0
    assert sorted(f.name for f in daemon.folder.iterdir()) == ["lock", "swap-log.jsonl"]
    assert "DaemonGone: swapd is stopping" in holder.await_end()
    holder.disconnect()
    assert (holder.look("a")[1], holder.look("m")[1]) == (a, m)


def test_stopping_does_not_wait_longer_than_it_was_told(world: World) -> None:
    daemon = world.daemon(stop_timeout=0.2)
    holder = world.worker(daemon, "holder")
    holder.register("m", 8 * MIB, mutable=True)
    holder.acquire("m")
    daemon.terminate()
    assert daemon.wait() == 0
    assert "stopping with leases still held: m (8 MiB) by holder" in daemon.log
    assert not list(daemon.folder.glob("*.sock"))
    assert "DaemonGone" in holder.await_end()
    written = holder.write("m", 5)
    holder.release("m")
    holder.disconnect()
    assert holder.look("m")[1] == written


def test_stopping_in_the_middle_of_a_copy(world: World) -> None:
    daemon = world.daemon(bandwidth="10MB/s")
    worker = world.worker(daemon, "worker")
    a = worker.register("a", 8 * MIB, seed=1)
    waiting = worker.start("acquire", "a")
    daemon.await_record("CopyIn", name="a")
    daemon.terminate()
    with pytest.raises(WorkerError, match="swapd is stopping") as refused:
        waiting.result()
    assert refused.value.kind == "DaemonGone"
    assert daemon.wait() == 0
    worker.await_end()
    worker.disconnect()
    assert worker.look("a")[1] == a


async def test_async_waits_end_when_the_daemon_stops(world: World) -> None:
    daemon = world.daemon(stop_timeout=60)
    async with await connect_async(daemon.folder, label="client", reconnect=0) as client:
        for name in ("a", "b"):
            await client.register(name, {"data": bytes_of(name, 12 * MIB)})
        lease = await client.acquire("a")

        async def acquire() -> None:
            await client.acquire("b")

        waiting = asyncio.get_running_loop().create_task(acquire(), name="acquire")
        await asyncio.to_thread(daemon.await_record, "Waiting", names=("b",))
        daemon.terminate()
        with pytest.raises(DaemonGone, match="swapd is stopping"):
            await waiting
        assert daemon.running
        lease.release()
        assert await asyncio.to_thread(daemon.wait) == 0


# --- clients end -------------------------------------------------------------------------


def test_the_daemon_outlives_all_its_clients(world: World) -> None:
    daemon = world.daemon()
    for i in range(3):
        workers = world.workers(daemon, f"one{i}", f"two{i}")
        for worker, name in zip(workers, "ab", strict=True):
            worker.register(name, 8 * MIB, mutable=name == "b")
            worker.acquire(name)
        for worker in workers:
            worker.kill()
            daemon.await_gone(worker)
    status = daemon.status()
    assert [s.label for s in status.sessions] == ["observer"]
    assert (status.used_bytes, status.quarantined_bytes, status.components) == (0, 0, ())
