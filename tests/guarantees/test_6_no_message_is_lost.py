"""Guarantee 6, of messages: each arrives, or is refused with a message; none is lost silently."""

import asyncio
import os
import select
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from swapd.shared import protocol
from swapd_client import (
    AsyncClient,
    AsyncLease,
    Client,
    InvalidArgument,
    Lease,
    Timeout,
    connect,
    connect_async,
)
from swapd_client.session import channel, loop_channel
from tests.guarantees.harness import MIB, RawSession, World, stop_process

#: More than the default queues of ZeroMQ on both sides hold, with a Unix socket between them.
MANY = 5000


async def acquire(client: AsyncClient, *names: str, await_registration: bool = False) -> AsyncLease:
    return await client.acquire(*names, await_registration=await_registration)


def assert_nothing_is_held(status: protocol.Status) -> None:
    assert [(c.name, c.leases) for c in status.components if c.leases] == []
    assert [(s.label, s.leases, s.waiting) for s in status.sessions if s.leases + s.waiting] == []


def acquired(client: Client, count: int) -> list[Lease]:
    client.register("a", {"data": bytearray(2 * MIB)})
    return [client.acquire("a") for _ in range(count)]


# --- correct clients ---------------------------------------------------------------------


async def test_5000_acquires_at_once_are_all_granted_and_all_released(world: World) -> None:
    daemon = world.daemon()
    async with await connect_async(daemon.folder) as client:
        await client.register("a", {"data": bytearray(2 * MIB)})
        leases = await asyncio.gather(*(acquire(client, "a") for _ in range(MANY)))
        assert len({lease.number for lease in leases}) == MANY
        (component,) = (await client.status()).components
        assert component.leases == MANY
        for lease in leases:
            lease.release()
        assert_nothing_is_held(await client.status())


async def test_a_loop_that_is_busy_while_it_is_answered_gets_all_answers(world: World) -> None:
    daemon = world.daemon()
    async with await connect_async(daemon.folder) as client:
        await client.register("a", {"data": bytearray(2 * MIB)})
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(acquire(client, "a"), name=f"{i}") for i in range(MANY)]
        await asyncio.sleep(0)  # now all of them have asked
        for _ in range(MANY):
            daemon.await_record("Grant")  # and nothing else runs in this loop
        for lease in await asyncio.gather(*tasks):
            lease.release()
        assert_nothing_is_held(await client.status())


def test_2500_leases_released_in_a_row_are_all_released(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whenever their thread waits until the daemon has received them, the daemon answers."""
    monkeypatch.setattr(channel, "unanswered", lambda *_: AssertionError("it waited in vain"))
    daemon = world.daemon()
    with connect(daemon.folder) as client:
        for lease in acquired(client, 2500):
            lease.release()
        assert_nothing_is_held(client.status())


def test_what_is_released_to_a_stopped_daemon_is_released_when_it_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if their thread has ended long before; and no wait is endless meanwhile."""
    monkeypatch.setattr(channel, "GRACE_S", 1.5)
    daemon = world.daemon()
    with connect(daemon.folder) as client:
        acquired(client, 1)[0].release()
        numbers: list[int] = []

        def release_many() -> None:
            leases = [client.acquire("a") for _ in range(600)]
            stop_process(daemon.pid)
            for lease in leases:
                lease.release()
            numbers.append(lease.number)

        thread = threading.Thread(target=release_many)
        thread.start()
        thread.join()
        with pytest.raises(Timeout, match="does not answer"):
            client.acquire("a", timeout=0.0)
        os.kill(daemon.pid, signal.SIGCONT)
        daemon.await_record("Release", lease=numbers[-1])
        assert_nothing_is_held(client.status())


def test_another_thread_s_release_to_a_stopped_daemon_does_not_raise(world: World) -> None:
    """It waits until the daemon knows, since the thread that acquired may ask at once."""
    daemon = world.daemon()
    with connect(daemon.folder) as client, ThreadPoolExecutor(1) as other:
        (lease,) = acquired(client, 1)
        stop_process(daemon.pid)
        other.submit(lease.release).result()
        os.kill(daemon.pid, signal.SIGCONT)
        daemon.await_record("Release", lease=lease.number)
        assert_nothing_is_held(client.status())


def test_hints_without_end_cost_no_answer(world: World) -> None:
    """Nobody requests the answers to hints, and they do not pile up."""
    daemon = world.daemon()
    with connect(daemon.folder) as client:
        acquired(client, 1)[0].release()
        for _ in range(20_000):
            client.leasing.hint("a")
        client.acquire("a").release()
        assert_nothing_is_held(client.status())


def test_what_was_asked_ahead_and_abandoned_without_end_costs_no_answer(world: World) -> None:
    daemon = world.daemon()
    with connect(daemon.folder) as client:
        acquired(client, 1)[0].release()
        for _ in range(6000):
            asked = client.session.next_id()
            client.leasing.ask(asked, "a")
            client.leasing.factory.channel().abandon(asked)
        client.acquire("a").release()
        assert_nothing_is_held(client.status())


def test_an_answer_that_comes_while_its_thread_waits_for_another_is_kept(world: World) -> None:
    daemon = world.daemon()
    with connect(daemon.folder) as client:
        acquired(client, 1)[0].release()
        asked = client.session.next_id()
        client.leasing.ask(asked, "a")
        client.status()
        lease = client.leasing.collect(asked, "a", within_s=0.0)
        assert lease is not None
        lease.release()


async def test_a_request_too_long_to_be_heard_is_refused(world: World) -> None:
    daemon = world.daemon()
    names = [f"{i:0200}" for i in range(6000)]
    said = r"^acquire of ('\d+', ){3}5997 more is a request of .* at most 1 MiB"
    with connect(daemon.folder) as client, pytest.raises(InvalidArgument, match=said):
        client.acquire(*names)
    async with await connect_async(daemon.folder) as client:
        with pytest.raises(InvalidArgument, match=said):
            await client.acquire(*names)
        assert_nothing_is_held(await client.status())


# --- more than there is room for ---------------------------------------------------------


async def test_more_requests_than_a_loop_may_have_open_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_channel, "UNANSWERED_MAX", 3000)
    daemon = world.daemon()
    async with await connect_async(daemon.folder) as client:
        loop = asyncio.get_running_loop()
        tasks = [
            loop.create_task(acquire(client, "later", await_registration=True)) for _ in range(3010)
        ]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 10
        for task in done:
            with pytest.raises(InvalidArgument, match="wait for some of them"):
                task.result()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert_nothing_is_held(await client.status())


def test_who_asks_past_that_all_the_same_is_refused_by_the_daemon(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    other.register("a", 2 * MIB)
    with RawSession(daemon.folder) as raw:
        for number in range(1, protocol.UNANSWERED_MAX + 1):
            raw.rpc.send(
                protocol.encode(
                    protocol.Acquire(number, ("later",), number, await_registration=True)
                )
            )
        said = raw.ask(protocol.Acquire(number + 1, ("a",)))
        assert isinstance(said, protocol.Refused)
        assert (said.id, said.code) == (number + 1, "limit")
        assert f"{protocol.UNANSWERED_MAX} requests" in said.message
        other.use("a")
        raw.rpc.send(protocol.encode(protocol.Cancel(number + 2, 1)))
        said = raw.ask(protocol.Acquire(number + 3, ("a",)))
        assert isinstance(said, protocol.Granted)
        raw.release(said)


def test_a_session_that_asks_on_and_never_reads_is_ended_and_no_other(world: World) -> None:
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    a = other.register("a", 2 * MIB, seed=1)
    with RawSession(daemon.folder) as deaf:
        deaf_to = deaf.lifeline.fileno()
        while not select.select([deaf_to], [], [], 0)[0]:
            for _ in range(500):
                deaf.rpc.send(protocol.encode(protocol.Prefetch(deaf.next_id(), ("a",))))
            assert other.use("a")[1] == a
        (goodbye,) = deaf.end()
        assert isinstance(goodbye, protocol.Goodbye)
        assert goodbye.code == "fenced"
        assert "does not read" in goodbye.message
        daemon.await_record("Unread", session=deaf.session, channel="replies")
        daemon.await_gone(deaf)
    assert other.use("a")[1] == a
    assert "does not read" in daemon.log


def test_a_session_that_reads_late_loses_nothing(world: World) -> None:
    """The daemon keeps the messages that a full socket does not take, and sends them later."""
    daemon = world.daemon()
    with RawSession(daemon.folder) as late:
        late.register("a", 2 * MIB)
        first = late.next_id() + 1
        for _ in range(MANY):
            late.rpc.send(protocol.encode(protocol.Prefetch(late.next_id(), ("a",))))
        daemon.await_record("Prefetch", id=first + MANY - 1)
        assert [late.answer().id for _ in range(MANY)] == list(range(first, first + MANY))


def test_a_daemon_that_is_asked_without_pause_still_keeps_time(world: World) -> None:
    """A deadline passes, and its waiter hears of it, while another session keeps asking."""
    daemon = world.daemon()
    other = world.worker(daemon, "other")
    other.register("a", 2 * MIB)
    ending = threading.Event()
    with RawSession(daemon.folder) as raw:

        def ask_on() -> None:
            while not ending.is_set():
                raw.rpc.send(protocol.encode(protocol.Cancel(raw.next_id(), 1)))

        asking = threading.Thread(target=ask_on)
        asking.start()
        try:
            for _ in range(5):
                with pytest.raises(Exception, match="not registered yet"):
                    other.acquire("later", await_registration=True, timeout=0.01)
        finally:
            ending.set()
            asking.join()
