"""Guarantee 6: every wait ends in a grant, or in an error that names the holders."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import pytest

from swapd.shared import protocol
from swapd_client import (
    AsyncClient,
    AsyncLease,
    ClientClosed,
    Deadlock,
    Timeout,
    TooLarge,
    UnknownComponent,
    connect,
    connect_async,
)
from tests.contents import bytes_of
from tests.guarantees.harness import MIB, PATIENCE_S, Daemon, WorkerError, World
from tests.guarantees.relay import Relay


@asynccontextmanager
async def connected(daemon: Daemon, label: str) -> AsyncIterator[AsyncClient]:
    async with await connect_async(daemon.folder, label=label) as client:
        yield client


async def awaiting(daemon: Daemon, *names: str) -> None:
    """Wait until the swap log has a waiter for `names`."""
    await asyncio.to_thread(daemon.await_record, "Waiting", names=names)


# --- refused at once ---------------------------------------------------------------------


def test_two_that_hold_what_the_other_waits_for(world: World) -> None:
    daemon = world.daemon()
    one, two = world.workers(daemon, "one", "two")
    a = one.register("a", 8 * MIB, seed=1)
    one.register("c", 8 * MIB, seed=3)
    two.register("b", 8 * MIB, seed=2)
    d = two.register("d", 8 * MIB, seed=4)
    one.acquire("a")
    two.acquire("b")
    waiting = one.start("acquire", "c")
    daemon.await_record("Waiting", names=("c",))
    with pytest.raises(WorkerError) as refused:
        two.acquire("d")
    assert refused.value.kind == "Deadlock"
    assert "one (session" in refused.value.message
    assert "waits for c, holding components that this needs" in refused.value.message
    assert "a (8 MiB) by one" in refused.value.message
    assert "Release before acquiring more, or acquire all at once" in refused.value.message

    assert not waiting.done
    assert one.start("look", "a", lane="second").result()[1] == a
    two.release("b")
    assert waiting.result()["loaded"]
    one.release("a")
    assert two.use("d")[1] == d


def test_one_that_holds_what_it_waits_for_itself(world: World) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    worker.register("a", 8 * MIB)
    worker.register("b", 12 * MIB)
    worker.acquire("a")
    with pytest.raises(WorkerError, match="own thread") as refused:
        worker.acquire("b")
    assert refused.value.kind == "Deadlock"
    worker.release("a")
    worker.use("b")


def test_a_name_nobody_registered_is_refused_with_the_near_ones(world: World) -> None:
    daemon = world.daemon()
    worker = world.worker(daemon, "worker")
    worker.register("text_encoder", 4 * MIB)
    worker.register("talker", 4 * MIB)
    with pytest.raises(WorkerError, match="did you mean 'text_encoder'") as refused:
        worker.acquire("text_encodr")
    assert refused.value.kind == "UnknownComponent"
    with pytest.raises(WorkerError, match="registered: talker, text_encoder"):
        worker.acquire("vae")
    with pytest.raises(WorkerError, match="nobody has registered 'vae'"):
        worker.prefetch("vae")


def test_members_of_an_alternating_group_exclude_each_other(world: World) -> None:
    daemon = world.daemon()
    worker, other = world.workers(daemon, "worker", "other")
    for name in ("a", "b"):
        worker.register(name, 4 * MIB, policy="alternating", group="g")
    with pytest.raises(WorkerError, match="exclude each other") as refused:
        worker.acquire("a", "b")
    assert refused.value.kind == "Conflict"
    worker.acquire("a")
    waiting = other.start("acquire", "b")
    daemon.await_record("Waiting", names=("b",))
    worker.release("a")
    waiting.result()
    assert daemon.component("a").state == "absent"


# --- waited for --------------------------------------------------------------------------


def test_a_name_that_comes_later_is_waited_for(world: World) -> None:
    daemon = world.daemon()
    early, late = world.workers(daemon, "early", "late")
    late.register("b", 4 * MIB)
    waiting = early.start("acquire", "a", "b", await_registration=True)
    daemon.await_record("Waiting", names=("a", "b"))
    with pytest.raises(WorkerError, match="not registered yet: a") as refused:
        early.start("acquire", "a", await_registration=True, timeout=0.1, lane="second").result()
    assert refused.value.kind == "Timeout"
    late.register("a", 4 * MIB)
    waiting.result()
    assert daemon.component("a").state == "leased"


def test_a_timeout_names_who_holds_what_and_leaves_nothing_behind(world: World) -> None:
    daemon = world.daemon()
    holder, worker = world.workers(daemon, "holder", "worker")
    holder.register("a", 12 * MIB)
    worker.register("b", 8 * MIB)
    holder.acquire("a")
    with pytest.raises(WorkerError) as refused:
        worker.acquire("b", timeout=0.1)
    assert refused.value.kind == "Timeout"
    assert "needs 8 MiB, free 4 MiB; held: a (12 MiB) by holder (session" in refused.value.message
    status = daemon.status()
    assert status.waiting == 0
    holder.release("a")
    assert daemon.component("b").state == "absent"
    assert not [c for c in daemon.watch.seen("CopyIn") if c.name == "b"]
    worker.use("b")


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, 3e6])
def test_a_very_long_timeout_is_no_timeout(world: World, timeout: float) -> None:
    daemon = world.daemon()
    holder, worker = world.workers(daemon, "holder", "worker")
    holder.register("a", 12 * MIB)
    worker.register("b", 8 * MIB)
    holder.acquire("a")
    waiting = worker.start("acquire", "b", timeout=timeout)
    daemon.await_record("Waiting", names=("b",))
    holder.release("a")
    waiting.result()


def test_several_components_come_all_or_not_at_all(world: World) -> None:
    daemon = world.daemon()
    holder, both, third = world.workers(daemon, "holder", "both", "third")
    holder.register("h", 8 * MIB)
    x = both.register("x", 8 * MIB, seed=1)
    y = both.register("y", 8 * MIB, seed=2)
    t = third.register("t", 4 * MIB, seed=3)
    holder.acquire("h")
    waiting = both.start("acquire", "x", "y")
    daemon.await_record("Waiting", names=("x", "y"))
    assert {c.name for c in daemon.status().components if c.leases} == {"h"}
    with pytest.raises(WorkerError, match="x \\+ y not granted in"):
        both.start("acquire", "x", "y", timeout=0.1, lane="second").result()

    behind = third.start("acquire", "t")
    daemon.await_record("Waiting", names=("t",))
    holder.release("h")
    waiting.result()
    assert {c.name for c in daemon.status().components if c.leases} == {"x", "y"}
    assert (both.look("x")[1], both.look("y")[1]) == (x, y)
    assert not behind.done, "first come, first served"
    both.release("x+y")
    behind.result()
    assert third.look("t")[1] == t


def test_who_waits_for_what_its_owner_takes_back_is_told_so(world: World) -> None:
    daemon = world.daemon()
    owner, holder, waiter = world.workers(daemon, "owner", "holder", "waiter")
    owner.register("a", 8 * MIB)
    holder.register("b", 16 * MIB)
    holder.acquire("b")
    waiting = waiter.start("acquire", "a")
    daemon.await_record("Waiting", names=("a",))
    owner.unregister("a")
    with pytest.raises(WorkerError, match="unregistered by owner") as refused:
        waiting.result()
    assert refused.value.kind == "UnknownComponent"


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
def test_a_grant_whose_memory_never_comes_ends_with_the_reason_of_the_sessions_end(
    world: World, early: bool
) -> None:
    daemon = world.daemon()
    with (
        Relay(world.folder / "relay", daemon.folder, withhold=protocol.Files) as relay,
        connect(relay.folder) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        client.register("a", {"data": bytearray(2 * MIB)})
        waiting = threads.submit(client.acquire, "a", early=early)
        assert relay.withheld.wait(PATIENCE_S)
        daemon.await_record("Grant")
        for _ in range(20):  # by then the other thread has read it, too
            client.status()
        client.close()
        with pytest.raises(ClientClosed):
            waiting.result(PATIENCE_S)


def test_a_component_somebody_else_leases_is_not_taken_back(world: World) -> None:
    daemon = world.daemon()
    owner, holder = world.workers(daemon, "owner", "holder")
    owner.register("a", 8 * MIB)
    holder.acquire("a")
    with pytest.raises(WorkerError, match="'a' is leased by holder") as refused:
        owner.unregister("a")
    assert refused.value.kind == "InUse"
    holder.release("a")
    owner.unregister("a")


def test_many_who_want_everything_all_get_it_in_turn(world: World) -> None:
    daemon = world.daemon()
    workers = world.workers(daemon, "one", "two", "three")
    for i, worker in enumerate(workers):
        worker.register(f"c{i}", 12 * MIB, seed=i)
    for swaps in [w.start("swap", f"c{i}", 8) for i, w in enumerate(workers)]:
        swaps.result()
    assert daemon.status().waiting == 0


# --- the same in asyncio -----------------------------------------------------------------


async def test_async_refusals_and_grants(world: World) -> None:
    daemon = world.daemon()
    data = {"data": bytearray(b"x" * 8 * MIB)}
    async with connected(daemon, "client") as client:
        a = await client.register("a", data)
        for name in ("b", "c"):
            await client.register(name, {"data": bytes_of(name, 8 * MIB)})
        with pytest.raises(TooLarge, match="needs 18 MiB"):
            await client.register("d", {"data": bytearray(17 * MIB)})
        with pytest.raises(UnknownComponent, match="nobody has registered"):
            await client.acquire("text")
        async with client.acquire("a", "b"):
            assert a.view("data")[-1] == ord("x")
            with pytest.raises(Deadlock):
                await client.acquire("c")
            holding = asyncio.Event()
            done = asyncio.Event()

            async def hold(name: str) -> None:
                async with client.acquire(name):
                    holding.set()
                    await done.wait()

            waiting = asyncio.get_running_loop().create_task(hold("c"), name="hold")
            await awaiting(daemon, "c")
            assert not holding.is_set()
        await holding.wait()
        with pytest.raises(Timeout, match=r"held: c \(8 MiB\) by client"):
            await client.acquire("a", "b", timeout=0.1)
        done.set()
        await waiting
        lease = await client.acquire("a", "b")
        lease.release()
        status = await client.status()
        assert status.waiting == 0
        assert not any(c.leases for c in status.components)


async def test_an_awaited_acquire_that_is_cancelled_is_forgotten(world: World) -> None:
    daemon = world.daemon()
    holder = world.worker(daemon, "holder")
    holder.register("h", 16 * MIB)
    holder.acquire("h")
    async with connected(daemon, "client") as client:
        await client.register("a", {"data": bytearray(8 * MIB)})

        async def acquire() -> None:
            await client.acquire("a")

        waiting = asyncio.get_running_loop().create_task(acquire(), name="acquire")
        await awaiting(daemon, "a")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(daemon.await_record, "Cancel")
        assert (await client.status()).waiting == 0
        await asyncio.to_thread(holder.release, "h")
        async with client.acquire("a"):
            pass
        with pytest.raises(TimeoutError):  # of asyncio, not of swapd
            async with asyncio.timeout(0.1):
                await client.acquire("later", await_registration=True)
        await asyncio.to_thread(daemon.await_record, "Cancel")
        assert (await client.status()).waiting == 0


async def acquire(client: AsyncClient, name: str) -> AsyncLease:
    return await client.acquire(name)


async def test_an_acquire_cancelled_as_it_is_granted_holds_nothing(world: World) -> None:
    daemon = world.daemon()
    async with connected(daemon, "client") as client:
        await client.register("a", {"data": bytearray(2 * MIB)})
        loop = asyncio.get_running_loop()
        for turns in range(40):
            task = loop.create_task(acquire(client, "a"))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                (await task).release()
        await client.prefetch("a")  # its answer follows those of all earlier messages
        assert (await client.status()).components[0].leases == 0
        assert (await client.status()).waiting == 0
